"""Scratch space held by the file system itself: a directory of its own project on an XFS that is mounted with `prjquota`.

Cheaper than a file system in a file, and softer: a program that runs as the directory's owner may give its files to another
project. The calls are those of quotactl_fd(2) (Linux 5.14) and of FS_IOC_FSSETXATTR.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import zlib
from pathlib import Path

from crater_agent.privileges import CAP_SYS_ADMIN, has_capability

QUOTACTL_FD = 443
"""The same number on every architecture."""
_GET_XATTR, _SET_XATTR = 0x801C581F, 0x401C5820
_XATTR = struct.Struct("=5I8x")
_INHERIT = 0x200
_PROJECT = 2
_SET_LIMIT, _GET_QUOTA, _GET_STATE = 0x5804, 0x5803, 0x5805
_ENFORCED = 1 << 5
_HARD = 1 << 3
_QUOTA = struct.Struct("=bbHI6Q")
_QUOTA_BYTES, _STATE_BYTES = 112, 80
_BLOCK = 512
_FIRST, _COUNT = 1 << 30, 1 << 30
"""Project ids of ours; an operator's own are small numbers."""
_TRIES = 64


def why_none(root: Path) -> str:
    """Why directories below `root`, which need not exist yet, cannot be held so; empty when they can."""
    if not has_capability(CAP_SYS_ADMIN):
        return "this agent may not set quotas (it does not run as root)"
    while not root.exists():
        root = root.parent
    state = ctypes.create_string_buffer(_STATE_BYTES)
    try:
        _quotactl(root, _GET_STATE, 0, state)
    except OSError as error:
        return f"{root} is not on an XFS mounted with prjquota ({error.strerror})"
    flags = struct.unpack_from("=bxH", state.raw)[1]
    return "" if flags & _ENFORCED else f"the XFS with {root} is not mounted with prjquota"


def hold(directory: Path, size_bytes: int) -> None:
    """From now on there is room for so much in it, and for no more. It has to be empty. Raises OSError."""
    project = _free_project(directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags, extent, extents, _, copied = _XATTR.unpack(fcntl.ioctl(fd, _GET_XATTR, bytes(_XATTR.size)))
        fcntl.ioctl(fd, _SET_XATTR, _XATTR.pack(flags | _INHERIT, extent, extents, project, copied))
    finally:
        os.close(fd)
    _limit(directory, project, size_bytes)


def project_of(directory: Path) -> int:
    """0: none of its own."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return int(_XATTR.unpack(fcntl.ioctl(fd, _GET_XATTR, bytes(_XATTR.size)))[3])
    except OSError:
        return 0
    finally:
        os.close(fd)


def release(beside: Path, project: int) -> None:
    """No limit any more for a project of ours, whose directory is gone. Raises OSError."""
    if project >= _FIRST:
        _limit(beside, project, 0)


def used_bytes(path: Path, project: int) -> int:
    quota = ctypes.create_string_buffer(_QUOTA_BYTES)
    try:
        _quotactl(path, _GET_QUOTA, project, quota)
    except FileNotFoundError:
        return 0
    return int(_QUOTA.unpack_from(quota.raw)[8]) * _BLOCK


def _free_project(directory: Path) -> int:
    """By the path, so that a directory that is made again gets the same; the next one where somebody has files in it."""
    first = zlib.crc32(os.fsencode(directory))
    for number in range(_TRIES):
        project = _FIRST + (first + number) % _COUNT
        if not used_bytes(directory, project):
            return project
    raise OSError(16, "no project id is free", str(directory))


def _limit(path: Path, project: int, size_bytes: int) -> None:
    blocks = -(-size_bytes // _BLOCK)
    body = _QUOTA.pack(1, _PROJECT, _HARD, project, blocks, 0, 0, 0, 0, 0).ljust(_QUOTA_BYTES, b"\0")
    _quotactl(path, _SET_LIMIT, project, ctypes.create_string_buffer(body, _QUOTA_BYTES))


def _quotactl(path: Path, command: int, project: int, buffer: ctypes.Array[ctypes.c_char]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        result = libc.syscall(QUOTACTL_FD, fd, ctypes.c_uint(command << 8 | _PROJECT), ctypes.c_uint(project), buffer)
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)
