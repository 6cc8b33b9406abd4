"""Run as a task: holds GPU memory by CUDA's driver API, with nothing but the driver's own library.

`cuda.py --hold 600 --hold 600`: a process for each, of so many MiB on the first device that it sees. Each prints one line of
JSON: its pid, the UUIDs of all devices that it sees, the memory of the first, and the code of a failed allocation (2: out of
memory). `--more 9000` then asks for so many MiB further, in pieces of 64; `--busy` computes until it is stopped.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import uuid

MIB = 1024**2
PIECE_MIB = 64


class Refused(Exception):
    """A call of the driver did not succeed; its code is the argument."""


class Cuda:
    """The first device that this process sees."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._pieces: list[tuple[ctypes.c_uint64, int]] = []
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        devices = [self._device(number) for number in range(count.value)]
        self.uuids = [self._uuid(device) for device in devices]
        total, context = ctypes.c_size_t(), ctypes.c_void_p()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(total), devices[0])
        self.memory_mib = total.value // MIB
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), devices[0])
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise Refused(code)

    def hold(self, mib: int) -> None:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib * MIB))
        self._pieces.append((pointer, mib))
        self.touch()

    @property
    def held_mib(self) -> int:
        return sum(mib for _, mib in self._pieces)

    def touch(self) -> None:
        """Write all of the newest piece, so that it is surely there."""
        pointer, mib = self._pieces[-1]
        self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), ctypes.c_size_t(mib * MIB))
        self.call("cuCtxSynchronize")

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        return device

    def _uuid(self, device: ctypes.c_int) -> str:
        found = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return f"GPU-{uuid.UUID(bytes=bytes(found))}"


def hold(mib: int, more_mib: int, busy: bool) -> None:
    told: dict[str, object] = {"pid": os.getpid()}
    try:
        cuda = Cuda()
    except Refused as refused:
        print(json.dumps(told | {"code": refused.args[0]}), flush=True)
        return
    told |= {"uuids": cuda.uuids, "memory_mib": cuda.memory_mib, "code": 0}
    try:
        cuda.hold(mib)
        for _ in range(more_mib // PIECE_MIB):
            cuda.hold(PIECE_MIB)
    except Refused as refused:
        told["code"] = refused.args[0]
    print(json.dumps(told | {"held_mib": cuda.held_mib}), flush=True)
    while busy:
        cuda.touch()
    signal.pause()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold", type=int, action="append", required=True, metavar="MIB")
    parser.add_argument("--more", type=int, default=0, metavar="MIB")
    parser.add_argument("--busy", action="store_true")
    asked = parser.parse_args()
    mine = asked.hold[0]
    for mib in asked.hold[1:]:
        # Before CUDA begins: it does not survive a fork.
        if not os.fork():
            mine = mib
            break
    hold(mine, asked.more, asked.busy)


if __name__ == "__main__":
    main()
