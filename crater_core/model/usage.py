"""Metering: one closed interval of one allocation."""

from __future__ import annotations

from dataclasses import dataclass

from crater_core.model.resources import Amounts

HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What an allocation held, from `from_ms` to `to_ms`, and what it was measured to use. Written when the allocation ends."""

    allocation: str
    task: str
    name: str
    project: str
    user: str
    quota_policy: str | None
    node: str
    held: Amounts
    from_ms: int
    to_ms: int
    used_cpu_ms: int = 0
    memory_peak_bytes: int = 0
    used_gpu_ms: int = 0
    """Time in which a device computed for it, summed over its devices."""
    gpu_memory_peak_mib: int = 0
    outcome: str = ""
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def duration_ms(self) -> int:
        return max(0, self.to_ms - self.from_ms)

    @property
    def gpu_hours(self) -> float:
        return self.held.gpu_milli / 1000 * self.duration_ms / HOUR_MS

    @property
    def core_hours(self) -> float:
        return self.held.cpu_milli / 1000 * self.duration_ms / HOUR_MS

    @property
    def gb_hours(self) -> float:
        """Gigabytes (10**9 bytes) of memory times hours."""
        return self.held.memory_bytes / 1e9 * self.duration_ms / HOUR_MS
