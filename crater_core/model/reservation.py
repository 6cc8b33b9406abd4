"""Room that a project has reserved in advance, from one time to another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReservedPart:
    """What is reserved on one node: so many whole GPUs, cores and memory."""

    node: str
    gpus: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0


def _no_names() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Reservation:
    """Amounts are in all; `parts` says where they are, and is chosen when the reservation is made."""

    name: str
    project: str
    from_ms: int
    to_ms: int
    gpus: int = 0
    cpu_milli: int = 0
    memory_bytes: int = 0
    gpu_types: tuple[str, ...] = ()
    node_labels: Mapping[str, str] = field(default_factory=_no_names)
    parts: tuple[ReservedPart, ...] = ()
    by: str = ""
    why: str = ""
    created_at_ms: int = 0

    def overlaps(self, other: Reservation) -> bool:
        return self.from_ms < other.to_ms and other.from_ms < self.to_ms

    def active(self, now_ms: int) -> bool:
        return self.from_ms <= now_ms < self.to_ms
