"""Whether a container may still open its GPUs: when the host's systemd is reloaded it may take the device files of running
containers away, which then fail in ways that look like the program's own fault."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

CONTROL = Path("/dev/nvidiactl")
"""What every user of any card opens."""
PATIENCE_S = 5.0
# Joins the group ("0" is the writer itself), then opens the file. Both are arguments: nothing is put into the script.
_SCRIPT = 'for group in "$@"; do [ "$group" = "$1" ] || echo 0 >"$group" || exit 3; done; exec 3<>"$1"'


def may_open(procs_files: Sequence[str], device: Path = CONTROL) -> bool | None:
    """Whether a process in that cgroup may open the device file; None where it cannot be told."""
    if not procs_files or not device.exists() or not os.access(device, os.R_OK | os.W_OK):
        return None
    command = ["/bin/sh", "-c", _SCRIPT, "probe", str(device), *procs_files]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, env={"LC_ALL": "C"}, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return True
    # The group may be gone by now; and only "not permitted" is the word of the cgroup, "denied" is that of the file.
    return False if done.returncode != 3 and b"Operation not permitted" in done.stderr else None
