"""What a caller asks to run, and what has become of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from crater_core.model.reason import Reason
from crater_core.model.resources import Request


class TaskType(StrEnum):
    TRAINING = "training"
    INFERENCE = "inference"
    BATCH = "batch"
    CONTROL = "control"
    """A tiny task that only drives others (a Dagster run worker): it starts at once, on a node's control share."""


class TaskStatus(StrEnum):
    QUEUED = "queued"
    ALLOCATED = "allocated"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REFUSED = "refused"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({TaskStatus.SUCCEEDED, TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.REFUSED})


class OnDisconnect(StrEnum):
    """What an agent does with a workload whose lease it cannot renew."""

    STOP = "stop"
    KEEP = "keep"


class VisibleDevices(StrEnum):
    """How CUDA_VISIBLE_DEVICES names a task's GPUs."""

    UUID = "uuid"
    INDEX = "index"
    """As numbers, for programs that can read nothing else."""


class When(StrEnum):
    """How a task must have ended for the one that comes after it to start."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Any way but well: failed, or cancelled."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class After:
    """A task to wait for, by id; or all members of an array, by its id."""

    task: str
    when: When = When.SUCCEEDED


ARRAY_PREFIX = "y"
"""With which the id of an array begins."""
ARRAY_LABEL = "crater/array"
"""Every member carries its array's id under this label, by which the store finds them."""


@dataclass(frozen=True, slots=True)
class Array:
    """Tasks made from one spec, each with an index. They share the spec, and with it this."""

    id: str
    size: int
    running_max: int | None = None
    """How many of them hold something at one time; None: as many as fit."""


class Apart(StrEnum):
    """How much it matters that two tasks are on different nodes."""

    NO = "no"
    PREFER = "prefer"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class Mount:
    """A path of the node shown to the task at another path."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """How a replica is probed: HTTP GET on its first port; any 2xx or 3xx answer is healthy."""

    path: str = "/health"
    interval_ms: int = 5_000
    timeout_ms: int = 2_000
    failures_max: int = 3


@dataclass(frozen=True, slots=True)
class OomRetry:
    """How much more a task gets that ran out of memory, or of GPU memory on a share, when it is tried again."""

    factor_milli: int = 1_500
    memory_max_bytes: int | None = None
    gpu_memory_max_mib: int | None = None
    """Bounds of its own, beside its quota and the largest node."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a task that ended without being asked to is queued again. Attempts are counted over all causes."""

    attempts_max: int = 1
    on_node_loss: bool = True
    on_failure: bool = False
    backoff_ms: int = 1_000
    exit_codes: tuple[int, ...] = ()
    """Exit codes after which it is tried again even when `on_failure` is not set."""
    on_oom: OomRetry | None = None


def _no_names() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What the caller asked for. Never edited after admission."""

    name: str
    type: TaskType = TaskType.BATCH
    project: str = "default"
    user: str = "anonymous"
    priority: int = 50
    """0 (last) to 100 (first)."""

    command: tuple[str, ...] = ()
    """Program and arguments; never a shell string. May be empty only with an image."""
    image: str | None = None
    """A container image: the docker runtime runs it. None: the process runtime."""
    env: Mapping[str, str] = field(default_factory=_no_names)
    env_profile: str | None = None
    """A named set of variables that the node adds (secrets stay there)."""
    working_dir: str | None = None
    warm_preload: tuple[str, ...] | None = None
    """Modules that a template process imports once, so that `python -m MODULE` starts as a fork of it; None: a cold start."""
    mounts: tuple[Mount, ...] = ()
    output_path: str | None = None
    shm_bytes: int = 0
    """Size of a container's /dev/shm, which counts as its memory; 0: the engine's own default (64 MiB)."""

    request: Request = Request()
    members: int = 1
    """More than one makes it a gang."""
    members_min: int | None = None
    """An elastic gang starts with as many members as fit, from this to `members`; None: with `members`, or not at all."""
    spread: Apart = Apart.NO
    """Members of the gang on different nodes."""
    anti_affinity: Apart = Apart.NO
    """No other task of its group on the same node."""
    pools: tuple[str, ...] = ()
    node_labels: Mapping[str, str] = field(default_factory=_no_names)
    prefer_labels: Mapping[str, str] = field(default_factory=_no_names)
    """Labels that make a node better, where the strategy is `affinity`; they exclude none."""
    data_bytes: Mapping[str, int] = field(default_factory=lambda: {})
    """Node name to the bytes of this task's data that lie there already, for the strategy `affinity`."""
    quota_policy: str | None = None
    strategy: str | None = None

    time_limit_ms: int | None = None
    checkpoint_every_ms: int | None = None
    """It saves its work at least so often, and goes on from there when it is started again; 0: it saves all on SIGTERM.
    None: what is stopped begins anew.
    """
    gpu_idle_stop_ms: int | None = None
    """It is stopped when none of its GPUs was used for so long; None: its node only tells."""
    gpu_visible_devices: VisibleDevices = VisibleDevices.UUID
    grace_ms: int = 10_000
    """From SIGTERM to SIGKILL."""
    retry: RetryPolicy = RetryPolicy()
    on_disconnect: OnDisconnect = OnDisconnect.STOP

    after: tuple[After, ...] = ()
    """Tasks that must have ended before. While one of them lives, this one waits; it is cancelled when one ends otherwise."""
    array: Array | None = None
    group: str | None = None
    """Tasks of one group can be listed, watched and cancelled together (a Dagster run and its steps)."""
    labels: Mapping[str, str] = field(default_factory=_no_names)
    """The caller's own notes; they never choose a node."""
    service: str | None = None
    service_generation: int = 0
    health: HealthCheck | None = None

    @property
    def members_fewest(self) -> int:
        return self.members if self.members_min is None else self.members_min


@dataclass(frozen=True, slots=True)
class Task:
    """A spec with its history so far. Times are milliseconds since the epoch."""

    id: str
    spec: TaskSpec
    status: TaskStatus
    submitted_at_ms: int
    queued_at_ms: int
    """When it last entered the queue; age counts from here."""
    reason: Reason | None = None
    """Why it waits, or why it ended."""
    array_index: int | None = None
    """Which member of its array it is."""
    attempt: int = 0
    """How many allocations it has had; the first is 1."""
    allocation: str | None = None
    """The live allocation, or the last one."""
    started_at_ms: int | None = None
    """First start of the last attempt."""
    ended_at_ms: int | None = None
    exit_code: int | None = None
    waited_ms: int = 0
    """Time spent in the queue, summed over attempts that have left it."""
    preemptions: int = 0
    excused: int = 0
    """Attempts that ended because their room was wanted back (preempted, reclaimed, drained): they use up no retry."""
    not_before_ms: int = 0
    """Backoff: not placed before this time."""
    foretold_ms: int | None = None
    """How long it is expected to run, by what tasks of its kind have taken; None when nothing is known."""
    cancel_reason: Reason | None = None
    """Set when somebody asked for its end while it was allocated or running."""
    fault: Reason | None = None
    """Why the first member of a gang ended early; the others are being stopped for it."""
    ready: bool = False
    """A replica whose health check passes; always False for other tasks."""
    grown: Request | None = None
    """What it asks for since it ran out of memory; its spec stays as it was admitted."""

    @property
    def asked(self) -> TaskSpec:
        """The spec as it counts for the next attempt."""
        return self.spec if self.grown is None else replace(self.spec, request=self.grown)
