"""Scratch space that cannot grow beyond what was asked for: an ext4 file system of that size in a sparse file.

The loop device goes with its mount, so nothing is left of one once it is unmounted and its file removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

from crater_agent.privileges import CAP_SYS_ADMIN, has_capability

CONTROL = Path("/dev/loop-control")
INODES = (4_096, 2_000_000)
BYTES_AN_INODE = 16_384
_GET_FREE, _CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR, _DIRECT = 4, 16
_NO_SUID, _NO_DEVICES, _DETACH = 2, 4, 2
_TRIES = 50


def why_none() -> str:
    """Why this agent cannot make one; empty when it can."""
    if not has_capability(CAP_SYS_ADMIN):
        return "this agent may not mount (it does not run as root)"
    if not CONTROL.exists():
        return f"{CONTROL} is not there"
    if shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return "mke2fs was not found: install e2fsprogs"
    return ""


def make(image: Path, at: Path, size_bytes: int, uid: int, gid: int) -> None:
    """`at` then holds an empty file system with room for `size_bytes`, whose root belongs to that user. Raises OSError."""
    inodes = min(max(size_bytes // BYTES_AN_INODE, INODES[0]), INODES[1])
    # What ext4 needs for itself comes on top: the task gets all that it asked for.
    whole = size_bytes + size_bytes // 64 + inodes * 256 + 4 * 1024**2
    fd = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, whole // 4096 * 4096)
        _format(image, inodes, uid, gid)
        loop = _attach(fd, image)
        try:
            _mount(f"/dev/loop{loop[1]}", at)
        finally:
            os.close(loop[0])
    except BaseException:
        image.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def remove(image: Path, at: Path) -> None:
    """Unmount it and give its room back; nothing happens when it is gone already."""
    unmount(at)
    image.unlink(missing_ok=True)


def unmount(at: Path) -> None:
    # Detached, so that a descriptor that somebody still holds does not keep it in everybody's sight.
    while at.is_mount():
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(at), _DETACH) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(at))


def used(at: str) -> tuple[int, int]:
    """Bytes in use and bytes left."""
    status = os.statvfs(at)
    return (status.f_blocks - status.f_bfree) * status.f_frsize, status.f_bavail * status.f_frsize


def _format(image: Path, inodes: int, uid: int, gid: int) -> None:
    # No journal: it is gone after a crash anyhow. No zeroing: the file is sparse.
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-N", str(inodes), "-O", "^has_journal,^resize_inode"]
    command += ["-E", f"lazy_itable_init=1,nodiscard,root_owner={uid}:{gid}", str(image)]
    done = subprocess.run(command, capture_output=True, check=False, env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})
    if done.returncode != 0:
        raise OSError(5, f"mke2fs: {done.stderr.decode(errors='replace').strip()[:500]}", str(image))


def _attach(image_fd: int, image: Path) -> tuple[int, int]:
    """A descriptor of a loop device that shows the file, and the device's number."""
    name = os.fsencode(image)[-63:]
    control = os.open(CONTROL, os.O_RDWR | os.O_CLOEXEC)
    try:
        for flags in (_AUTOCLEAR | _DIRECT, _AUTOCLEAR):
            for _ in range(_TRIES):
                number = fcntl.ioctl(control, _GET_FREE)
                device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
                info = struct.pack("=QQQQQIIII64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
                try:
                    fcntl.ioctl(device, _CONFIGURE, struct.pack("=II", image_fd, 0) + info + bytes(64))
                    return device, number
                except OSError as error:
                    os.close(device)
                    # Busy: somebody else took it between the two calls. Invalid: no direct access to this file.
                    if error.errno == 22 and flags & _DIRECT:
                        break
                    if error.errno != 16:
                        raise
    finally:
        os.close(control)
    raise OSError(16, "no loop device is free", str(image))


def _mount(device: str, at: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    flags = ctypes.c_ulong(_NO_SUID | _NO_DEVICES)
    if libc.mount(device.encode(), os.fsencode(at), b"ext4", flags, b"discard") != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mounting its scratch space: {os.strerror(number)}", str(at))
    with contextlib.suppress(OSError):
        (at / "lost+found").rmdir()
