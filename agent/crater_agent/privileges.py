"""What the kernel lets this process do beyond an ordinary user."""

from __future__ import annotations

from pathlib import Path

CAP_SYS_ADMIN = 21


def has_capability(number: int, status: Path = Path("/proc/self/status")) -> bool:
    """By the effective set: root in a container often lacks what root on the machine has."""
    for line in status.read_text("ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
