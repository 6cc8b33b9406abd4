"""Holds a cgroup of version 2 to a list of device files: writes the small program that the kernel asks at each opening.

Version 2 has no devices controller; the kernel's own interface is a program of type BPF_PROG_TYPE_CGROUP_DEVICE (Linux 4.15).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

from crater_agent.device_files import EVERYBODYS, DeviceFile

_SYSCALLS = {"x86_64": 321, "aarch64": 280, "riscv64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_TYPE_CGROUP_DEVICE, _ATTACH_DEVICE = 15, 6
_ALLOW_MULTI = 2
_LOAD_WORD, _AND, _JUMP_NOT_EQUAL, _MOVE, _EXIT = 0x61, 0x54, 0x56, 0xB7, 0x95
_KINDS = {"b": 1, "c": 2}
_PROGRAMS_MAX = 16


def hold(group: Path, allowed: Sequence[DeviceFile]) -> None:
    """From now on the processes of a cgroup may open these device files and no others. Raises OSError."""
    program = _loaded(tuple(allowed))
    directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A program of a level above holds, too: nothing here can widen what that one allows.
        _bpf(_PROG_ATTACH, struct.pack("<IIII", directory, program, _ATTACH_DEVICE, _ALLOW_MULTI))
    finally:
        os.close(directory)


def why_not() -> str:
    """Why this process cannot do it; empty when it can."""
    if platform.machine() not in _SYSCALLS:
        return f"unknown on {platform.machine()}"
    try:
        _loaded(EVERYBODYS)
    except OSError as error:
        return f"the kernel takes no BPF program from this agent ({error.strerror})"
    return ""


@functools.lru_cache(maxsize=_PROGRAMS_MAX)
def _loaded(allowed: tuple[DeviceFile, ...]) -> _Program:
    code = instructions(allowed)
    text, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"Apache-2.0")
    fields = struct.pack("<IIQQ", _TYPE_CGROUP_DEVICE, len(code) // 8, ctypes.addressof(text), ctypes.addressof(licence))
    return _Program(_bpf(_PROG_LOAD, fields))


class _Program:
    """Its descriptor; once attached, the kernel keeps the program for the cgroup's life."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __index__(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


def instructions(allowed: Sequence[DeviceFile]) -> bytes:
    """1 for what is on the list, 0 for all else. The kernel hands in kind and access, major, and minor as three words."""
    code = _one(_LOAD_WORD, 2, 1, offset=0) + _one(_AND, 2, value=0xFFFF)
    code += _one(_LOAD_WORD, 4, 1, offset=4) + _one(_LOAD_WORD, 5, 1, offset=8)
    for file in allowed:
        checks = [(2, _KINDS[file.kind]), (4, file.major)]
        checks += [(5, file.minor)] if file.minor is not None else []
        for number, (register, value) in enumerate(checks):
            # Past the checks that are left, and past the two that say yes.
            code += _one(_JUMP_NOT_EQUAL, register, offset=len(checks) - number + 1, value=value)
        code += _one(_MOVE, 0, value=1) + _one(_EXIT)
    return code + _one(_MOVE, 0, value=0) + _one(_EXIT)


def _one(code: int, target: int = 0, source: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | target, offset, value)


def _bpf(command: int, fields: bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    block = ctypes.create_string_buffer(fields.ljust(128, b"\0"), 128)
    result = int(libc.syscall(_SYSCALLS[platform.machine()], command, block, 128))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "bpf")
    return result
