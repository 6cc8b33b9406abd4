"""One workload as the agent holds it in memory: what was asked, what is known, and what has still to be reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from crater_agent.reconcile import Exit, Phase, Seen, Want
from crater_agent.records import Record
from crater_core.model.allocation import AllocationStatus, Use
from crater_core.model.reason import Reason
from crater_core.wire.agents import Lease, ReasonBody, ReportBody, UseBody


@dataclass(slots=True)
class Workload:
    record: Record
    phase: Phase = Phase.STARTING
    pid: int = 0
    start_ticks: int = 0
    orphan: bool = False
    """Not a child of the spawner we speak with: its end is seen by looking, and its exit code is lost."""
    exit: Exit | None = None
    lives: bool = True
    stop: tuple[AllocationStatus, Reason] | None = None
    stop_asked_ms: int | None = None
    stop_grace_ms: int = 0
    preparing: bool = False
    kills: int = 0
    use: Use = Use()
    memory_max_bytes: int = 0
    """The highest the kernel saw; for the story of an OOM kill."""
    sampled_ms: int = 0
    disk_sampled_ms: int = 0
    disk_cost_ms: int = 0
    disk_full: bool = False
    """Nothing more could be written when it was last looked at."""
    over_memory_since_ms: int | None = None
    over_disk_since_ms: int | None = None
    ready: bool = False
    unhealthy: Reason | None = None
    silent_ms: int = 0
    end: ReportBody | None = None
    pending: list[ReportBody] = field(default_factory=lambda: [])
    """Reports that the scheduler has not taken yet, oldest first."""

    @property
    def allocation(self) -> str:
        return self.record.allocation

    @property
    def is_warned(self) -> bool:
        return self.over_memory_since_ms is not None or self.over_disk_since_ms is not None

    @property
    def running(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    def seen(self) -> Seen:
        record = self.record
        watched = not record.group and record.memory_bytes > 0
        return Seen(
            allocation=record.allocation,
            token=record.token,
            phase=self.phase,
            restartable=record.restartable,
            grace_ms=record.grace_ms,
            started_ms=record.started_ms,
            time_limit_ms=record.time_limit_ms,
            stop_asked_ms=self.stop_asked_ms,
            stop_grace_ms=self.stop_grace_ms,
            main_gone=self.exit is not None,
            lives=self.lives,
            memory_bytes=self.use.memory_bytes,
            memory_limit_bytes=record.memory_bytes if watched else None,
            over_memory_since_ms=self.over_memory_since_ms,
            over_disk_since_ms=self.over_disk_since_ms,
            disk_bytes=self.use.disk_bytes,
            disk_limit_bytes=record.disk_bytes or None,
            disk_held=record.disk_held,
            unhealthy=self.unhealthy,
            preparing=self.preparing,
        )

    def conclude(self, end: ReportBody) -> None:
        """Nothing of it lives, and this is to be reported, perhaps once more."""
        self.phase, self.lives, self.end = Phase.ENDED, False, end
        self.pending = [report for report in self.pending if not report.status.ended] + [end]

    def progress(self, reason: Reason | None = None) -> ReportBody:
        """Where it stands, while it has not ended."""
        return ReportBody(
            allocation=self.allocation,
            token=self.record.token,
            status=AllocationStatus.STARTING if self.phase is Phase.STARTING else AllocationStatus.RUNNING,
            reason=ReasonBody.of(reason) if reason else None,
            use=use_body(self.use),
            ready=self.ready,
        )

    def final(self, status: AllocationStatus, reason: Reason) -> ReportBody:
        code = None
        if self.exit is not None:
            code = self.exit.code if self.exit.signal is None else 128 + self.exit.signal
        return ReportBody(
            allocation=self.allocation,
            token=self.record.token,
            status=status,
            reason=ReasonBody.of(reason),
            exit_code=code,
            use=use_body(self.use),
        )


def use_body(use: Use) -> UseBody:
    return UseBody(
        cpu_ms=use.cpu_ms,
        memory_bytes=use.memory_bytes,
        memory_peak_bytes=use.memory_peak_bytes,
        disk_bytes=use.disk_bytes,
        gpu_memory_peak_mib=use.gpu_memory_peak_mib,
        cpu_percent_milli=use.cpu_percent_milli,
    )


def want_of(lease: Lease) -> Want:
    return Want(lease.allocation, lease.token, lease.stop, lease.started, lease.restartable, lease.grace_ms)
