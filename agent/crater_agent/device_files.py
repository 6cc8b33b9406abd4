"""Device files that a workload may open, named by the kernel's numbers so that no path can stand for another device."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

NVIDIA_MAJOR = 195
NVIDIA_CONTROL_MINORS = (254, 255)
"""nvidia-modeset and nvidiactl, which every user of any card opens."""


@dataclass(frozen=True, slots=True)
class DeviceFile:
    kind: str
    """"c" or "b", as `ls -l` shows it."""
    major: int
    minor: int | None = None
    """None: every minor of the major."""

    @property
    def rule(self) -> str:
        """As the devices controller of cgroup v1 takes it."""
        return f"{self.kind} {self.major}:{'*' if self.minor is None else self.minor} rwm"


EVERYBODYS = (
    DeviceFile("c", 1, 3),  # null
    DeviceFile("c", 1, 5),  # zero
    DeviceFile("c", 1, 7),  # full
    DeviceFile("c", 1, 8),  # random
    DeviceFile("c", 1, 9),  # urandom
    DeviceFile("c", 5, 0),  # tty
    DeviceFile("c", 5, 2),  # ptmx
    DeviceFile("c", 136),  # pts/*
)
"""What any program may expect; holds no data of anybody."""


def of_path(path: Path) -> DeviceFile:
    """Raises OSError when it is not there, ValueError when it is no device file."""
    status = path.stat()
    if not (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise ValueError(f"{path} is not a device file")
    kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
    return DeviceFile(kind, os.major(status.st_rdev), os.minor(status.st_rdev))


def of_nvidia(minor: int | None, mig: Iterable[str] = (), proc: Path = Path("/proc")) -> tuple[DeviceFile, ...]:
    """What a program needs to use one card; a driver that does not say which `minor` it has leaves no choice but all.

    `mig`: the slice's places below /proc/driver/nvidia/capabilities.
    """
    files = [DeviceFile("c", NVIDIA_MAJOR, number) for number in (minor, *NVIDIA_CONTROL_MINORS)]
    majors = _majors(proc)
    # By the driver's number and not by the file, which may be made only when the first program asks for it.
    files += [DeviceFile("c", majors[name]) for name in ("nvidia-uvm",) if name in majors]
    for place in mig:
        text = _read(proc / "driver/nvidia/capabilities" / place / "access")
        found = [line.rpartition(":")[2].strip() for line in text.splitlines() if line.startswith("DeviceFileMinor")]
        files += [DeviceFile("c", majors["nvidia-caps"], int(number)) for number in found if "nvidia-caps" in majors]
    return tuple(files)


def _majors(proc: Path) -> dict[str, int]:
    words = [line.split() for line in _read(proc / "devices").partition("Block devices:")[0].splitlines()]
    return {pair[1]: int(pair[0]) for pair in words if len(pair) == 2 and pair[0].isdigit()}


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", errors="replace")
    except OSError:
        return ""
