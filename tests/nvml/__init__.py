"""The NVML stand-in: `build(directory)` compiles it, `environ` makes a process load it in place of the driver's library."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.c")


def build(directory: Path) -> Path:
    """libnvidia-ml.so.1 in `directory`."""
    library = directory / "libnvidia-ml.so.1"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def build_cuda(directory: Path) -> Path:
    """libcuda.so.1 in `directory`: what programs allocate by it, the NVML stand-in shows."""
    library = directory / "libcuda.so.1"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE.with_name("cuda.c"))]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


def environ(library: Path, file: Path) -> dict[str, str]:
    path = f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return {"LD_LIBRARY_PATH": path, "CRATER_NVML_FILE": str(file)}


def gpu(
    uuid: str,
    name: str = "NVIDIA A100-SXM4-80GB",
    bus: str = "00000000:01:00.0",
    memory_mib: int = 81_920,
    used_mib: int = 100,
    use: int = 7,
    celsius: int = 40,
    milliwatt: int = 60_000,
    answer: int = 0,
    mig: int = -1,
) -> str:
    return f"gpu {uuid} {bus} {memory_mib} {used_mib} {use} {celsius} {milliwatt} {answer} {mig} {name}"


def process(uuid: str, pid: int, memory_mib: int, use: int = 0, kind: str = "compute") -> str:
    return f"process {uuid} {pid} {memory_mib} {use} {kind}"


def values(uuid: str, **given: int) -> list[str]:
    """Lines that set values of a card: see README.md for the keys."""
    return [f"set {uuid} {key} {value}" for key, value in given.items()]


def xid(uuid: str, number: int, sequence: int) -> str:
    return f"xid {uuid} {number} {sequence}"


def write(file: Path, lines: Iterable[str]) -> None:
    new = file.with_suffix(".new")
    new.write_text("driver 570.86.15\n" + "".join(f"{line}\n" for line in lines))
    new.replace(file)
