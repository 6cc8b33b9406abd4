"""Measures the node itself every `sample_interval`: the kernel's counters, and how fast they grew since the last time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from crater_agent.machine import MachineSample
from crater_core.clock import Clock

log = logging.getLogger("crater.agent.node")
WAITING = ("idle", "iowait")
"""The modes of CPU time in which a core computes nothing."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Over the time between two samples; all but the first by the second."""

    cpu_use_milli: int = 0
    """Thousandths of all cores together."""
    context_switches: float = 0.0
    disk_reads: float = 0.0
    disk_writes: float = 0.0
    disk_read_bytes: float = 0.0
    disk_written_bytes: float = 0.0
    network_received_bytes: float = 0.0
    network_sent_bytes: float = 0.0
    network_errors: float = 0.0


_DISKS = ("disk_reads", "disk_writes", "disk_read_bytes", "disk_written_bytes")
_NETWORK = ("network_received_bytes", "network_sent_bytes", "network_errors")
GROWING = ("context_switches", *_DISKS, *_NETWORK)


def rates(before: MachineSample, after: MachineSample, elapsed_ms: int) -> Rates | None:
    """None without time between. A counter that fell, as after a device was taken away, counts as unchanged."""
    if elapsed_ms <= 0:
        return None
    grown = {name: max(0, getattr(after, name) - getattr(before, name)) * 1000 / elapsed_ms for name in GROWING}
    spent = {mode: max(0.0, after.cpu_seconds[mode] - before.cpu_seconds.get(mode, 0.0)) for mode in after.cpu_seconds}
    whole = sum(spent.values())
    busy = whole - sum(spent.get(mode, 0.0) for mode in WAITING)
    return Rates(round(busy * 1000 / whole) if whole else 0, **grown)


class NodeWatch:
    """`last` is at most `interval_ms` old while `run` runs."""

    def __init__(self, take: Callable[[], MachineSample], interval_ms: int, clock: Clock) -> None:
        self._take, self._interval_ms, self._clock = take, interval_ms, clock
        self.last, self._last_ms = take(), clock.monotonic_ms()
        self.rates: Rates | None = None
        """None before the second sample."""

    def look(self) -> None:
        sample, now_ms = self._take(), self._clock.monotonic_ms()
        self.rates = rates(self.last, sample, now_ms - self._last_ms) or self.rates
        self.last, self._last_ms = sample, now_ms

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            try:
                self.look()
            except OSError as error:
                log.warning("the node could not be measured: %s", error)
