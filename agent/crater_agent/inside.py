"""In the forked child: a view of the file system of its own, in which paths of the node appear elsewhere.

Nothing is made on the node's own file systems for it: a folder that a target needs and the node does not have is made up in
memory, beside what is there. All of it goes when the last process that lives in it has ended.
Standard library only, since the spawner imports it.
"""

# ruff: noqa: PTH115, PTH118, PTH120, PTH208, PTH211, PTH112, PTH103, PTH123
# (pathlib costs the spawner memory and time)

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from typing import Any

Message = dict[str, Any]
ENTRIES_MAX = 1000
"""Of a directory that gets a made-up neighbour."""
_NEW_NAMESPACE = 0x20000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _SLAVE = 1, 2, 4, 32, 4096, 16384, 1 << 19
_DETACH = 2
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
_HERE, _EMPTY_PATH, _ALL_BELOW, _CLONE, _FROM_EMPTY_PATH = -100, 0x1000, 0x8000, 1, 4
_NO_NEW_PRIVILEGES = 38


def enter(wish: Message) -> None:
    """Raises OSError, with the path that it is about."""
    libc = ctypes.CDLL(None, use_errno=True)
    _told(libc.unshare(_NEW_NAMESPACE), "a mount namespace")
    _mount(libc, None, "/", None, _RECURSIVE | _SLAVE)
    binds: list[Message] = wish["binds"]
    # Taken before anything is covered, and looked at: between the agent's check and now a link may have been put there.
    trees = [_take(libc, bind["source"], bind["read_only"]) for bind in binds]
    _hide_others(libc, wish["hide"], wish["keep"])
    _make_up(libc, binds, wish["staging"])
    for bind, tree in zip(binds, trees, strict=True):
        if os.path.realpath(bind["target"]) != bind["target"]:
            raise OSError(errno.ELOOP, "it is reached through a link", bind["target"])
        _put(libc, tree, bind["target"])
    # With other files in place of the node's own, no program may lend its privileges.
    _told(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")


def _hide_others(libc: Any, root: str, own: str) -> None:
    """Scratch file systems of other tasks: seen here they would stay mounted for as long as this task lives."""
    with open("/proc/self/mountinfo", "rb") as file:
        mounted = [os.fsdecode(line.split()[4]) for line in file]
    for path in reversed(mounted):
        if path.startswith(f"{root}/") and path != own:
            libc.umount2(os.fsencode(path), _DETACH)


def _make_up(libc: Any, binds: list[Message], staging: str) -> None:
    missing: dict[str, list[Message]] = {}
    for bind in binds:
        inside_another = any(bind["target"].startswith(f"{other['target']}/") for other in binds)
        if not inside_another and not os.path.lexists(bind["target"]):
            missing.setdefault(_there(bind["target"]), []).append(bind)
    # The root last: it moves everything.
    for parent in sorted(missing, reverse=True):
        _with_neighbours(libc, parent, missing[parent], staging)


def _there(path: str) -> str:
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _with_neighbours(libc: Any, parent: str, binds: list[Message], staging: str) -> None:
    """Put a directory in memory in the place of `parent`: all that is in it, and what `binds` need. Itself it is read-only."""
    entries = os.listdir(parent)
    if len(entries) > ENTRIES_MAX:
        raise OSError(errno.E2BIG, f"it is not there, and {parent} has too many entries to make it up", binds[0]["target"])
    os.makedirs(staging, exist_ok=True)
    _mount(libc, "crater", staging, "tmpfs", _NO_SUID | _NO_DEVICES, "mode=755,size=4m")
    for entry in entries:
        path, copy = os.path.join(parent, entry), os.path.join(staging, entry)
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(path), copy)
            continue
        _place_for(copy, stat.S_ISDIR(mode))
        _mount(libc, path, copy, None, _BIND | _RECURSIVE)
    for bind in binds:
        copy = staging + bind["target"].removeprefix(parent.rstrip("/"))
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        _place_for(copy, os.path.isdir(bind["source"]))
    _mount(libc, None, staging, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    if parent == "/":
        os.chdir(staging)
        _told(libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "/")
        _told(libc.umount2(b".", _DETACH), "/")
        os.chdir("/")
    else:
        _mount(libc, staging, parent, None, _BIND | _RECURSIVE)
        _told(libc.umount2(os.fsencode(staging), _DETACH), staging)


def _place_for(path: str, directory: bool) -> None:
    if directory:
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _take(libc: Any, path: str, read_only: bool) -> int:
    """A tree of mounts like the one at `path`, not yet anywhere; with all that is mounted below."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise OSError(errno.ELOOP, "it is reached through a link", path)
        tree = _told(libc.syscall(_OPEN_TREE, fd, b"", _EMPTY_PATH | _ALL_BELOW | _CLONE | os.O_CLOEXEC), path)
    finally:
        os.close(fd)
    wanted = struct.pack("=QQQQ", _NO_SUID | _NO_DEVICES | (_READ_ONLY if read_only else 0), 0, 0, 0)
    _told(libc.syscall(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH | _ALL_BELOW, wanted, len(wanted)), path)
    return tree


def _put(libc: Any, tree: int, target: str) -> None:
    _told(libc.syscall(_MOVE_MOUNT, tree, b"", _HERE, os.fsencode(target), _FROM_EMPTY_PATH), target)
    os.close(tree)


def _mount(libc: Any, source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [os.fsencode(text) if text is not None else None for text in (source, target, kind, options)]
    _told(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), target)


def _told(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result
