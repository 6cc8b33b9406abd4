"""A CUDA program that does nothing: it makes its first device's context, says `ready`, and stays until its input ends.

Run by itself (`python -I -S mps_probe.py`) in the environment of an MPS client; what goes wrong is its one line of output.
"""

import ctypes
import sys


def main() -> int:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        print(f"libcuda cannot be loaded: {error}", flush=True)
        return 1
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for what, call in (
        ("cuInit", lambda: cuda.cuInit(0)),
        ("cuDeviceGet", lambda: cuda.cuDeviceGet(ctypes.byref(device), 0)),
        ("cuDevicePrimaryCtxRetain", lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)),
        ("cuCtxSetCurrent", lambda: cuda.cuCtxSetCurrent(context)),
    ):
        code = call()
        if code != 0:
            print(f"{what} failed with CUDA error {code}", flush=True)
            return 1
    print("ready", flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
