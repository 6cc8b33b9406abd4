"""One workload as the agent holds it in memory: what was asked, what is known, and what has still to be reported."""

from __future__ import annotations

from dataclasses import dataclass, field

from crater_agent.reconcile import Exit, Phase, Seen, Want
from crater_agent.records import Record
from crater_core.model.allocation import AllocationStatus, Use
from crater_core.model.reason import Reason
from crater_core.wire.agents import Lease, ReasonBody, ReportBody, UseBody


@dataclass(slots=True)
class DeviceUse:
    """Of one device, by one workload."""

    memory_mib: int = 0
    percent: int | None = None
    """Of the device, since the reading before; None where it cannot be told."""
    used: bool | None = None
    sampled_ms: int | None = None


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
    gpus: dict[str, DeviceUse] = field(default_factory=lambda: {})
    """By UUID: what was last seen of it there."""
    over_gpu_memory_since_ms: int | None = None
    gpu_idle_since_ms: int | None = None
    """None while it uses a device of its own, or nobody can tell."""
    gpu_idle_warned: bool = False
    gpu_fault: Reason | None = None
    """What befell a device of its while it ran: how it ends from here on is not its own doing."""
    gpu_fault_stops: bool = False
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
        since = (self.over_memory_since_ms, self.over_disk_since_ms, self.over_gpu_memory_since_ms)
        return self.gpu_idle_warned or any(one is not None for one in since)

    @property
    def running(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.STOPPING)

    def seen(self) -> Seen:
        record = self.record
        device, used_mib, limit_mib = self._fullest_gpu()
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
            gpu=device,
            gpu_memory_mib=used_mib,
            gpu_memory_limit_mib=limit_mib,
            over_gpu_memory_since_ms=self.over_gpu_memory_since_ms,
            gpu_idle_since_ms=self.gpu_idle_since_ms,
            gpu_idle_warned=self.gpu_idle_warned,
            gpu_idle_stop_ms=record.gpu_idle_stop_ms,
            gpu_fault=self.gpu_fault if self.gpu_fault_stops else None,
            unhealthy=self.unhealthy,
            preparing=self.preparing,
        )

    def _fullest_gpu(self) -> tuple[int, int, int | None]:
        """Index, MiB used and share in MiB of the device on which it is closest to its share, or furthest beyond; where it has
        no share to keep to, a limit of None."""
        held = [(grant, self.gpus[grant.uuid].memory_mib) for grant in self.record.gpus if grant.uuid in self.gpus]
        shares = [
            (used_mib / grant.limit_mib, grant.index, used_mib, grant.limit_mib) for grant, used_mib in held if grant.limit_mib
        ]
        return max(shares)[1:] if shares else (0, 0, None)

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
        gpu_memory_mib=use.gpu_memory_mib,
        gpu_busy_ms=use.gpu_busy_ms,
        gpu_percent_milli=use.gpu_percent_milli,
        cpu_percent_milli=use.cpu_percent_milli,
    )


def want_of(lease: Lease) -> Want:
    return Want(lease.allocation, lease.token, lease.stop, lease.started, lease.restartable, lease.grace_ms)
