"""Processes on a GPU that belong to no task: what the kernel says of them."""

from __future__ import annotations

import pwd
from pathlib import Path


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def who_is(pid: int) -> tuple[str, str]:
    """Its user and its program's name. Not its arguments: they may hold secrets."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return "?", "gone"
    try:
        return pwd.getpwuid(uid).pw_name, _comm(pid)
    except KeyError:
        return str(uid), _comm(pid)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
