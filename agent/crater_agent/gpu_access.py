"""Why GPUs cannot be used by this user: who may open their device files, and in which groups the agent is."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path

CARDS = "nvidia[0-9]*"


def closed_files(files: Collection[Path], uid: int, groups: Collection[int]) -> list[tuple[Path, str]]:
    """Those that this user may not open for reading and writing, with the name of the group that may (empty: none)."""
    found: list[tuple[Path, str]] = []
    for file in sorted(files):
        status = file.stat()
        mode = stat.S_IMODE(status.st_mode)
        owner = uid == status.st_uid and mode & 0o600 == 0o600
        member = status.st_gid in groups and mode & 0o060 == 0o060
        if uid and not (owner or member or mode & 0o006 == 0o006):
            found.append((file, _group_name(status.st_gid) if mode & 0o060 == 0o060 else ""))
    return found


def why_closed(dev: Path = Path("/dev")) -> str:
    """In words, with the fix; empty when this process may open every file of the driver's."""
    uid, groups = os.geteuid(), {os.getegid(), *os.getgroups()}
    closed = closed_files([*dev.glob(CARDS), *dev.glob("nvidiactl")], uid, groups)
    if not closed:
        return ""
    file, group = closed[0]
    user, mine = _user_name(uid), ", ".join(sorted(_group_name(gid) for gid in groups))
    if not group or group == "root":
        return f"{file} is open to root only, and the agent runs as {user}: give it a group, such as video, by a udev rule"
    return f"{file} is open to the group {group}; the agent's user {user} is in {mine}: `usermod -aG {group} {user}`, restart it"


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
