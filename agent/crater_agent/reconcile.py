"""What an agent does next: the leases that are wanted and the workloads that are seen go in, actions come out.

Pure: times are readings of one monotonic clock, handed in. Called again after every change and every second, so an action
whose effect is not seen yet may come again; every action may be carried out twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.units import show_duration


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """Asked to end; `stop_asked_ms` says when."""
    ENDED = "ended"
    """Nothing of it lives, its final state is on disk and not yet accepted by the scheduler."""
    REPORTED = "reported"
    """The scheduler has taken its final state; remembered until it is off the list, so that it is not started again."""


_HOLDING = (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)
UNWANTED_GRACE_MS_MAX = 10_000
"""What was given to others meanwhile waits no longer than this for one that is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Want:
    """One lease, as far as the decision needs it."""

    allocation: str
    token: int
    stop: bool = False
    started: bool = False
    restartable: bool = True
    grace_ms: int = 10_000


@dataclass(frozen=True, slots=True)
class Seen:
    """One workload of this agent, as it is now."""

    allocation: str
    token: int
    phase: Phase = Phase.RUNNING
    restartable: bool = True
    grace_ms: int = 10_000
    started_ms: int = 0
    time_limit_ms: int | None = None
    stop_asked_ms: int | None = None
    stop_grace_ms: int = 0
    main_gone: bool = False
    """Its first process has ended."""
    lives: bool = True
    """Something of it, children included, still lives."""
    memory_bytes: int = 0
    memory_limit_bytes: int | None = None
    """None: nothing to watch, because there is no limit or the kernel holds it."""
    over_memory_since_ms: int | None = None
    disk_bytes: int = 0
    disk_limit_bytes: int | None = None
    disk_held: bool = False
    """It cannot take more: its scratch space is a file system of that size."""
    over_disk_since_ms: int | None = None
    gpu: int = 0
    """Index of the device that the next three are about."""
    gpu_memory_mib: int = 0
    """Summed over its processes."""
    gpu_memory_limit_mib: int | None = None
    over_gpu_memory_since_ms: int | None = None
    gpu_idle_since_ms: int | None = None
    gpu_idle_warned: bool = False
    gpu_idle_stop_ms: int | None = None
    gpu_fault: Reason | None = None
    """A device of its failed in such a way that what runs there is to be stopped."""
    unhealthy: Reason | None = None
    preparing: bool = False
    """Its start waits for something that takes long and can be given up, such as its image."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    """How long the scheduler has been silent, and after how long it counts this node as lost."""

    silent_ms: int = 0
    heartbeat_timeout_ms: int = 30_000

    @property
    def kill_at_ms(self) -> int:
        """Silence after which nothing that may be started elsewhere can be left alive."""
        return self.heartbeat_timeout_ms - min(2_000, self.heartbeat_timeout_ms // 10)

    def fence_at_ms(self, grace_ms: int) -> int:
        """Silence after which such a workload is asked to end."""
        return self.kill_at_ms - self.fence_grace_ms(grace_ms)

    def fence_grace_ms(self, grace_ms: int) -> int:
        return min(grace_ms, self.heartbeat_timeout_ms // 4)


@dataclass(frozen=True, slots=True)
class Settings:
    node: str = ""
    memory_warning_ms: int = 1_500
    """How long a watched workload may stay over its memory before it is stopped."""
    memory_over_percent_max: int = 115
    """Beyond this share of its limit it is stopped at once: what grows that fast would take the machine down."""
    memory_stop_grace_ms: int = 3_000
    disk_warning_ms: int = 10_000
    """How long a watched workload may stay over its disk before it is stopped."""
    disk_over_percent_max: int = 110
    """Beyond this share of its limit it is stopped at once, before it takes what belongs to others."""
    disk_nearly_full_percent: int = 95
    gpu_memory_warning_ms: int = 3_000
    """How long a workload may stay over its share of a GPU's memory before it is stopped."""
    gpu_memory_over_percent_max: int = 125
    """Beyond this share of its limit it is stopped at once: what it takes is missing to those it shares the device with."""
    gpu_idle_warning_ms: int | None = None
    """How long a workload may leave all its GPUs unused before it is told; None: it is not told."""


@dataclass(frozen=True, slots=True)
class Start:
    allocation: str


@dataclass(frozen=True, slots=True)
class Warn:
    """It is over a limit; it will be stopped if it stays so."""

    allocation: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Stop:
    """SIGTERM now; `Kill` follows when `grace_ms` have passed. `status` and `reason` are its end."""

    allocation: str
    status: AllocationStatus
    reason: Reason
    grace_ms: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to everything of it."""

    allocation: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing of it lives: write its final state to disk, then report it."""

    allocation: str


@dataclass(frozen=True, slots=True)
class Report:
    """Say that it has ended, of a lease that this agent holds no workload for."""

    allocation: str
    token: int
    status: AllocationStatus
    reason: Reason


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove what is left of it but its logs."""

    allocation: str


Action = Start | Warn | Stop | Kill | Finish | Report | Forget


def reconcile(
    wanted: Iterable[Want] | None,
    seen: Iterable[Seen],
    now_ms: int,
    lease: LeaseState = LeaseState(),
    settings: Settings = Settings(),
) -> tuple[Action, ...]:
    """`wanted` is None as long as no list has been heard since the agent began: then nothing counts as unwanted."""
    wants = {want.allocation: want for want in wanted or ()}
    known = {workload.allocation: workload for workload in seen}
    actions: list[Action] = []
    leaving = False
    for allocation in sorted(known):
        workload = known[allocation]
        want = wants.get(allocation)
        if want is not None and want.token != workload.token:
            want = None
        leaving |= wanted is not None and want is None and workload.lives and workload.phase in _HOLDING
        actions += _of_known(workload, want, wanted is not None, now_ms, lease, settings)
    fresh = [action for name in wants if name not in known for action in _of_unknown(wants[name], lease, settings)]
    # What the scheduler has taken back it may have given away again already: first out, then in.
    actions += [action for action in fresh if not (leaving and isinstance(action, Start))]
    return tuple(actions)


def _of_unknown(want: Want, lease: LeaseState, settings: Settings) -> tuple[Action, ...]:
    if want.stop:
        reason = Reason.of(ReasonCode.CANCELLED, by="the scheduler", why="")
        return (Report(want.allocation, want.token, AllocationStatus.CANCELLED, reason),)
    if want.started:
        # It ran here once and this agent knows nothing of it (its data directory is new): a second copy is never the answer.
        reason = Reason.of(ReasonCode.NODE_LOST, node=settings.node, silent_ms=lease.silent_ms)
        return (Report(want.allocation, want.token, AllocationStatus.LOST, reason),)
    if lease.silent_ms >= lease.fence_at_ms(want.grace_ms):
        return ()
    return (Start(want.allocation),)


def _of_known(
    workload: Seen, want: Want | None, heard: bool, now_ms: int, lease: LeaseState, settings: Settings
) -> tuple[Action, ...]:
    if workload.phase is Phase.ENDED:
        return ()
    if workload.phase is Phase.REPORTED:
        return (Forget(workload.allocation),) if heard and want is None else ()
    if workload.phase is Phase.STARTING:
        stop = _stop_for_lease(workload, want, heard, lease, settings) if workload.preparing else None
        return (stop,) if stop is not None else ()
    if workload.main_gone:
        return (Kill(workload.allocation),) if workload.lives else (Finish(workload.allocation),)
    if workload.phase is Phase.STOPPING:
        return _of_stopping(workload, heard and want is None, now_ms, lease)
    stop = _stop_for_lease(workload, want, heard, lease, settings) or _stop_for_limit(workload, now_ms, settings)
    if stop is not None:
        return (stop,)
    return tuple(Warn(workload.allocation, reason) for reason in _warnings(workload, now_ms, settings))


def _of_stopping(workload: Seen, unwanted: bool, now_ms: int, lease: LeaseState) -> tuple[Action, ...]:
    grace_ms = min(workload.stop_grace_ms, UNWANTED_GRACE_MS_MAX) if unwanted else workload.stop_grace_ms
    asked_ms = workload.stop_asked_ms if workload.stop_asked_ms is not None else now_ms
    fenced = workload.restartable and lease.silent_ms >= lease.kill_at_ms
    return (Kill(workload.allocation),) if fenced or now_ms - asked_ms >= grace_ms else ()


def _stop_for_lease(workload: Seen, want: Want | None, heard: bool, lease: LeaseState, settings: Settings) -> Stop | None:
    name, grace_ms = workload.allocation, workload.grace_ms
    if want is not None and want.stop:
        reason = Reason.of(ReasonCode.CANCELLED, by="the scheduler", why="")
        return Stop(name, AllocationStatus.CANCELLED, reason, grace_ms)
    restartable = workload.restartable if want is None else want.restartable
    if restartable and lease.silent_ms >= lease.fence_at_ms(grace_ms):
        reason = Reason.of(ReasonCode.NODE_LOST, node=settings.node, silent_ms=lease.silent_ms)
        return Stop(name, AllocationStatus.LOST, reason, lease.fence_grace_ms(grace_ms))
    if heard and want is None:
        reason = Reason.of(ReasonCode.CANCELLED, by="the agent", why=": the scheduler no longer wants it")
        return Stop(name, AllocationStatus.CANCELLED, reason, min(grace_ms, UNWANTED_GRACE_MS_MAX))
    return None


def _stop_for_limit(workload: Seen, now_ms: int, settings: Settings) -> Stop | None:
    name, failed = workload.allocation, AllocationStatus.FAILED
    if workload.time_limit_ms is not None and now_ms - workload.started_ms >= workload.time_limit_ms:
        return Stop(name, failed, Reason.of(ReasonCode.TIME_LIMIT, limit_ms=workload.time_limit_ms), workload.grace_ms)
    if workload.unhealthy is not None:
        return Stop(name, failed, workload.unhealthy, workload.grace_ms)
    memory = _memory_reason(workload)
    if memory is not None:
        assert workload.memory_limit_bytes is not None
        since_ms = workload.over_memory_since_ms
        if workload.memory_bytes * 100 > workload.memory_limit_bytes * settings.memory_over_percent_max:
            return Stop(name, failed, memory, 0)
        if since_ms is not None and now_ms - since_ms >= settings.memory_warning_ms:
            return Stop(name, failed, memory, min(workload.grace_ms, settings.memory_stop_grace_ms))
    if workload.gpu_fault is not None:
        return Stop(name, _status_of(workload.gpu_fault), workload.gpu_fault, workload.grace_ms)
    stop = _stop_for_gpu_memory(workload, now_ms, settings) or _stop_for_idle_gpu(workload, now_ms)
    if stop is not None:
        return stop
    limit, since_ms = workload.disk_limit_bytes, workload.over_disk_since_ms
    if limit is not None and not workload.disk_held and workload.disk_bytes > limit:
        much = workload.disk_bytes * 100 > limit * settings.disk_over_percent_max
        if much or (since_ms is not None and now_ms - since_ms >= settings.disk_warning_ms):
            reason = Reason.of(ReasonCode.DISK_EXCEEDED, limit_bytes=limit, peak_bytes=workload.disk_bytes)
            return Stop(name, failed, reason, workload.grace_ms)
    return None


def _status_of(gpu_fault: Reason) -> AllocationStatus:
    """What the task did itself is its failure; what befell it is not."""
    return AllocationStatus.FAILED if gpu_fault.code is ReasonCode.GPU_WITHOUT_MPS else AllocationStatus.LOST


def _stop_for_gpu_memory(workload: Seen, now_ms: int, settings: Settings) -> Stop | None:
    limit, since_ms = workload.gpu_memory_limit_mib, workload.over_gpu_memory_since_ms
    if limit is None or workload.gpu_memory_mib <= limit:
        return None
    reason = Reason.of(ReasonCode.GPU_MEMORY_EXCEEDED, limit_mib=limit, peak_mib=workload.gpu_memory_mib)
    if workload.gpu_memory_mib * 100 > limit * settings.gpu_memory_over_percent_max:
        return Stop(workload.allocation, AllocationStatus.FAILED, reason, 0)
    if since_ms is not None and now_ms - since_ms >= settings.gpu_memory_warning_ms:
        return Stop(workload.allocation, AllocationStatus.FAILED, reason, min(workload.grace_ms, settings.memory_stop_grace_ms))
    return None


def _stop_for_idle_gpu(workload: Seen, now_ms: int) -> Stop | None:
    since_ms, limit_ms = workload.gpu_idle_since_ms, workload.gpu_idle_stop_ms
    if since_ms is None or limit_ms is None or now_ms - since_ms < limit_ms:
        return None
    reason = Reason.of(ReasonCode.GPU_IDLE_STOPPED, idle_ms=now_ms - since_ms, limit_ms=limit_ms)
    return Stop(workload.allocation, AllocationStatus.FAILED, reason, workload.grace_ms)


def _idle_warning(workload: Seen, now_ms: int, settings: Settings) -> Reason | None:
    """Told after the node's time, or halfway to its own stop where that comes earlier."""
    since_ms, stop_ms = workload.gpu_idle_since_ms, workload.gpu_idle_stop_ms
    times = [ms for ms in (settings.gpu_idle_warning_ms, stop_ms // 2 if stop_ms is not None else None) if ms is not None]
    if since_ms is None or workload.gpu_idle_warned or not times or now_ms - since_ms < min(times):
        return None
    follows = f"; it is stopped at {show_duration(stop_ms)} of that" if stop_ms is not None else ""
    return Reason.of(ReasonCode.GPU_IDLE, idle_ms=now_ms - since_ms, what_follows=follows)


def _warnings(workload: Seen, now_ms: int, settings: Settings) -> Iterator[Reason]:
    """What it has not been warned of yet."""
    memory, limit = _memory_reason(workload), workload.disk_limit_bytes
    if memory is not None and workload.over_memory_since_ms is None:
        yield Reason(ReasonCode.OVER_MEMORY, memory.facts)
    if limit is not None and workload.over_disk_since_ms is None and is_near_disk(workload, settings):
        code = ReasonCode.DISK_NEARLY_FULL if workload.disk_held else ReasonCode.OVER_DISK
        yield Reason.of(code, limit_bytes=limit, peak_bytes=workload.disk_bytes)
    share, taken = workload.gpu_memory_limit_mib, workload.gpu_memory_mib
    if share is not None and taken > share and workload.over_gpu_memory_since_ms is None:
        yield Reason.of(ReasonCode.OVER_GPU_MEMORY, device=str(workload.gpu), limit_mib=share, peak_mib=taken)
    idle = _idle_warning(workload, now_ms, settings)
    if idle is not None:
        yield idle


def is_near_disk(workload: Seen, settings: Settings) -> bool:
    """Whether its disk is worth a warning: over, or where it cannot be over, nearly full."""
    percent = settings.disk_nearly_full_percent if workload.disk_held else 100
    return workload.disk_limit_bytes is not None and workload.disk_bytes * 100 > workload.disk_limit_bytes * percent


def _memory_reason(workload: Seen) -> Reason | None:
    limit = workload.memory_limit_bytes
    if limit is None or workload.memory_bytes <= limit:
        return None
    return Reason.of(ReasonCode.MEMORY_EXCEEDED, limit_bytes=limit, peak_bytes=workload.memory_bytes)


@dataclass(frozen=True, slots=True)
class Exit:
    """How the first process of a workload ended, and what the kernel counted meanwhile."""

    code: int | None = None
    signal: int | None = None
    known: bool = True
    """False: nobody was there to see it."""
    fenced: bool = False
    """Stopped by the spawner while no agent renewed the lease."""
    oom_kills: int = 0
    disk_full: bool = False
    engine_lost: bool = False
    """The container engine went down and took it along."""


def outcome(
    end: Exit,
    stop: tuple[AllocationStatus, Reason] | None,
    facts: Mapping[str, int],
    node: str,
    gpu_fault: Reason | None = None,
) -> tuple[AllocationStatus, Reason]:
    """The final state. `facts`: `limit_bytes` and `peak_bytes` of memory, `disk_limit_bytes` and `disk_bytes`, `silent_ms` of a
    fence. `gpu_fault`: what befell its device while it ran, to which a failure is put down."""
    if stop is not None:
        return stop
    if end.fenced:
        return AllocationStatus.LOST, Reason.of(ReasonCode.NODE_LOST, node=node, silent_ms=facts.get("silent_ms", 0))
    if end.engine_lost:
        return AllocationStatus.LOST, Reason.of(ReasonCode.ENGINE_LOST, node=node)
    if not end.known:
        return AllocationStatus.FAILED, Reason.of(ReasonCode.EXIT_UNKNOWN)
    if end.code == 0:
        return AllocationStatus.SUCCEEDED, Reason.of(ReasonCode.FINISHED)
    if gpu_fault is not None:
        return _status_of(gpu_fault), gpu_fault
    if end.oom_kills > 0:
        limit_bytes, peak_bytes = facts.get("limit_bytes", 0), facts.get("peak_bytes", 0)
        return AllocationStatus.FAILED, Reason.of(ReasonCode.OOM_KILLED, limit_bytes=limit_bytes, peak_bytes=peak_bytes)
    if end.disk_full:
        limit_bytes, peak_bytes = facts.get("disk_limit_bytes", 0), facts.get("disk_bytes", 0)
        return AllocationStatus.FAILED, Reason.of(ReasonCode.DISK_EXCEEDED, limit_bytes=limit_bytes, peak_bytes=peak_bytes)
    if end.signal is not None:
        return AllocationStatus.FAILED, Reason.of(ReasonCode.SIGNALLED, signal=end.signal)
    return AllocationStatus.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=end.code if end.code is not None else -1)
