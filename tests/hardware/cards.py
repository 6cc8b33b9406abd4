"""The card that these tests run on: a real one, or the stand-ins of its driver's libraries. To the tests both are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mps
import nvml

from crater_agent.nvml import Nvml

PROGRAM = Path(__file__).with_name("cuda.py")
STAND_IN_UUID = "GPU-aaaaaaaa-0000-1111-2222-333333333333"


@dataclass(frozen=True)
class Card:
    uuid: str
    index: int
    memory_mib: int
    environ: dict[str, str] = field(default_factory=lambda: {})
    """What an agent, or a program on the card, needs beside its own environment."""
    stand_in: Path | None = None
    """Where the stand-ins are, if it is none of iron."""

    def holder(self, *arguments: object) -> list[str]:
        """The command of a task that holds memory on it."""
        return [sys.executable, str(PROGRAM), *map(str, arguments)]

    def outside(self, *arguments: object) -> subprocess.Popen[bytes]:
        """The same program, started by somebody else than Crater."""
        environ = {**os.environ, **self.environ, "CUDA_VISIBLE_DEVICES": self.uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        return subprocess.Popen(self.holder(*arguments), env=environ, stdout=subprocess.DEVNULL)


def stand_in(directory: Path) -> Card:
    """The first of two cards: a task that saw the other one would be found out."""
    library = nvml.build(directory)
    nvml.build_cuda(directory)
    other = "GPU-bbbbbbbb-0000-1111-2222-333333333333"
    nvml.write(directory / "gpus", [nvml.gpu(STAND_IN_UUID, use=0), nvml.gpu(other, bus="00000000:02:00.0", use=0)])
    mps.build(directory)
    return Card(STAND_IN_UUID, 0, 81_920, {**nvml.environ(library, directory / "gpus"), **mps.environ(directory)}, directory)


def real() -> Card | str:
    """The first card without slices that nobody uses; or why there is none."""
    door = Nvml()
    try:
        found = door.discover()
        for gpu in found.gpus:
            if not gpu.mig and gpu.memory_mib and not any(holder.computes for holder in door.glance(gpu.uuid).holders or ()):
                return Card(gpu.uuid, gpu.index, gpu.memory_mib)
        return found.note if not found.gpus else "every GPU of this machine is in use, or is divided into slices"
    finally:
        door.close()


def lines(text: str) -> list[dict[str, Any]]:
    """What `cuda.py` has said, a dictionary for each process."""
    return [json.loads(line) for line in text.splitlines()]
