"""What free room is worth to the tasks that are expected: prices that a strategy reads, worked out beside the cycles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crater_core.model.node import Node, SharingMode
from crater_core.model.resources import TypicalRequest

MICRO = 1_000_000
"""Prices are in millionths of what a whole device earns when it is all given out."""


@dataclass(frozen=True, slots=True)
class Make:
    """What a node offers, as far as prices tell nodes apart. Its first device stands for all."""

    gpu_type: str = ""
    model: str = ""
    device_memory_mib: int = 0
    sharing: SharingMode = SharingMode.EXCLUSIVE
    overcommit_milli: int = 0
    devices: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0

    @staticmethod
    def of(node: Node) -> Make:
        give = node.allocatable
        if not node.devices:
            return Make(cpu_milli=give.cpu_milli, memory_bytes=give.memory_bytes)
        first = min(node.devices, key=lambda device: (device.index, device.uuid))
        return Make(
            first.gpu_type,
            first.model,
            first.memory_mib,
            first.sharing,
            first.overcommit_milli,
            len(node.devices),
            give.cpu_milli,
            give.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class MakePrices:
    """Of one make, in millionths of a device."""

    room_micro: tuple[int, ...]
    """Worth of a device with 0, 1, ... 1000 thousandths free. Never falls as the room grows."""
    core_micro: int = 0
    gib_micro: int = 0
    """Worth of one free core, and of one GiB of memory."""


@dataclass(frozen=True, slots=True)
class PriceTable:
    """Prices for the makes and the mix of requests for which they were worked out. A make that is not there has no price."""

    workload: tuple[TypicalRequest, ...]
    makes: Mapping[Make, MakePrices]
