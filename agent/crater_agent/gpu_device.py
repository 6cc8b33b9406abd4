"""One of the node's real GPUs as the watch holds it in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from crater_agent.gpu_quarantine import Quarantine
from crater_agent.gpu_reader import CardReader
from crater_agent.gpu_reading import Glance, Reading
from crater_agent.gpu_tenants import Tenancy, faults_of_tenancy
from crater_agent.nvml import Gpu
from crater_agent.records import Granted
from crater_agent.workload import Workload

RELEASE_S = 6.0
"""How long the driver may take to give back what an ended task held, before a next task is refused the device."""


@dataclass(slots=True)
class Device:
    """What is known of one."""

    gpu: Gpu
    reader: CardReader
    reading: Reading | None = None
    """The last whole one."""
    glance: Glance | None = None
    """The last of any kind."""
    looked_ms: int = 0
    tenancy: Tenancy | None = None
    quarantine: Quarantine = Quarantine()
    strangers: dict[int, int] = field(default_factory=lambda: {})
    """Since when a process of nobody's was seen, by pid."""
    unsettled_ms: int | None = None
    """Since when something of an ended task may still be there; at first, until it was looked at."""
    reported: str = ""
    """Why it is in quarantine, as the scheduler knows it."""
    xids: int = 0
    throttled: frozenset[str] = frozenset()

    def settle(self, waiting: bool, occupied: bool, now_ms: int) -> None:
        """Look again soon while something may be left of an ended task, until it is gone or has been there for too long."""
        if waiting and self.unsettled_ms is None:
            self.unsettled_ms = now_ms
        if self.unsettled_ms is None:
            return
        glance, late = self.glance, now_ms - self.unsettled_ms >= RELEASE_S * 1000 / 2
        empty = glance is not None and not faults_of_tenancy(glance, self.tenancy, occupied) and not self.strangers
        if (empty and not waiting) or late:
            self.unsettled_ms = None

    def is_of(self, workload: Workload) -> bool:
        return any(grant.uuid == self.gpu.uuid for grant in workload.record.gpus)

    def grant_of(self, workload: Workload) -> Granted:
        """What a workload that has it was given of it."""
        return next(grant for grant in workload.record.gpus if grant.uuid == self.gpu.uuid)
