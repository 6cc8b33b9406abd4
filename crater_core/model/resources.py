"""What a task asks for and what a node gives: amounts in whole units, and the GPU part of a request."""

from __future__ import annotations

import re
from dataclasses import dataclass

from crater_core.model.units import MILLI

MIG_PROFILE = r"(?:(?:[0-9]+c\.)?[0-9]+g\.[0-9]+gb[a-z0-9.+]*)"
_SLICES = re.compile(rf"(?:.* )?{MIG_PROFILE}")
CARD_SLICES_MAX = 7
"""The most compute slices that a card has. (Smaller ones have four.)"""


def names_slice(gpu_type: str) -> bool:
    """Whether it is a MIG profile (3g.40gb), or the model of a slice, which ends with one. In lower case."""
    return "g." in gpu_type and _SLICES.fullmatch(gpu_type) is not None


def compute_slices(profile: str) -> int:
    """How many of its card's compute slices a slice has: 3 for 3g.40gb, 1 for 1c.3g.40gb (a part of such a slice); 0: unknown."""
    leading = re.match("[0-9]+", profile.rpartition(" ")[2])
    return int(leading[0]) if leading else 0


@dataclass(frozen=True, slots=True)
class Amounts:
    """A vector of the five things that are counted. Adding and subtracting go element by element."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpu_milli: int = 0
    gpu_memory_mib: int = 0

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.cpu_milli + other.cpu_milli,
            self.memory_bytes + other.memory_bytes,
            self.disk_bytes + other.disk_bytes,
            self.gpu_milli + other.gpu_milli,
            self.gpu_memory_mib + other.gpu_memory_mib,
        )

    def __sub__(self, other: Amounts) -> Amounts:
        return Amounts(
            self.cpu_milli - other.cpu_milli,
            self.memory_bytes - other.memory_bytes,
            self.disk_bytes - other.disk_bytes,
            self.gpu_milli - other.gpu_milli,
            self.gpu_memory_mib - other.gpu_memory_mib,
        )

    def times(self, count: int) -> Amounts:
        return Amounts(
            self.cpu_milli * count,
            self.memory_bytes * count,
            self.disk_bytes * count,
            self.gpu_milli * count,
            self.gpu_memory_mib * count,
        )


NOTHING = Amounts()


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """GPUs for one member of a task.

    Whole devices: `compute_milli == 1000` and `exclusive`. A share: `compute_milli` and `memory_mib` are per device;
    zero compute means "derive it": the same fraction of compute as of memory, rounded up to a thousandth. Zero memory
    means the same fraction of memory as of compute.
    """

    count: int
    compute_milli: int = MILLI
    memory_mib: int = 0
    exclusive: bool = True
    types: tuple[str, ...] = ()
    """Accepted GPU types, any of them; empty accepts all cards. Compared with the device's `gpu_type` and model, lower case.
    A MIG profile among them accepts slices of that profile too.
    """
    mig_profile: str | None = None
    """Whole MIG slices of this profile, or "any"; None asks for cards, and for slices only where `types` names them."""

    @property
    def may_be_slice(self) -> bool:
        return self.mig_profile is not None or any(names_slice(name) for name in self.types)

    @property
    def least_milli(self) -> int:
        """What each device counts at least, in thousandths of a card; a share by memory alone counts nothing yet."""
        if not self.may_be_slice:
            return self.compute_milli
        named = [self.mig_profile] if self.mig_profile is not None else [name for name in self.types if names_slice(name)]
        return min(max(1, compute_slices(name)) for name in named) * MILLI // CARD_SLICES_MAX


@dataclass(frozen=True, slots=True)
class Request:
    """What one member of a task needs on one node."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gpu: GpuRequest | None = None
    ports: int = 0

    @property
    def amounts(self) -> Amounts:
        """The request as a vector, for quotas. A memory-only share counts its compute only once a device is chosen,
        and what may be a MIG slice at least what the smallest is.
        """
        gpu = self.gpu
        return Amounts(
            self.cpu_milli,
            self.memory_bytes,
            self.disk_bytes,
            gpu.count * gpu.least_milli if gpu else 0,
            gpu.count * gpu.memory_mib if gpu else 0,
        )


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """A request with the number of times it was seen."""

    request: Request
    weight: int
