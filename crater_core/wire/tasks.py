"""Tasks: what a caller submits, and what it is shown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.plan import Explanation
from crater_core.model.reason import Reason
from crater_core.model.resources import Amounts
from crater_core.model.task import (
    After,
    Apart,
    HealthCheck,
    Mount,
    OnDisconnect,
    OomRetry,
    RetryPolicy,
    Task,
    TaskSpec,
    TaskStatus,
    TaskType,
    VisibleDevices,
    When,
)
from crater_core.model.units import show_bytes
from crater_core.model.usage import HOUR_MS
from crater_core.wire.base import Incoming, Outgoing, ReasonView
from crater_core.wire.resources import AmountsView, Bytes, DurationMs, GrantView, Mib, Milli, Resources

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
TEXT_MAX = 131_072
"""Bytes of one argument or variable that Linux passes to a program (MAX_ARG_STRLEN)."""


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character")
    return text


def _absolute(path: str) -> str:
    if not path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"must be an absolute path without '..', found {path!r}")
    return path


def _env_name(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a variable name (letters, digits and _; no digit first)")
    if name.startswith("CRATER_"):
        raise ValueError(f"{name!r}: names that start with CRATER_ are set by the agent")
    return name


Text = Annotated[str, Field(max_length=TEXT_MAX), AfterValidator(_no_nul)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Slug = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Label = Annotated[str, Field(max_length=1000), AfterValidator(_no_nul)]
Path = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_no_nul), AfterValidator(_absolute)]
EnvName = Annotated[str, Field(max_length=200), AfterValidator(_env_name)]


ModuleName = Annotated[str, Field(max_length=300, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class MountBody(Incoming):
    source: Path
    target: Path
    read_only: bool = True


class OomBody(Incoming):
    """A task that ran out of memory is tried again with `factor` times as much, up to the maximum, its quota and the largest
    node; a share that used too much GPU memory in the same way."""

    factor: Milli = Field(default=1_500, ge=1_050, le=10_000, description="a number from 1.05 to 10")
    memory_max: Bytes | None = None
    gpu_memory_max: Mib | None = None


class RetryBody(Incoming):
    """`attempts` counts the first try (3 where `exit_codes` or `on_oom` is given, else 1). A lost node runs a task again by
    itself unless `on_node_loss` is off."""

    attempts: int = Field(default=1, ge=1, le=100)
    on_node_loss: bool = True
    on_failure: bool = False
    backoff: DurationMs = 1_000
    exit_codes: tuple[Annotated[int, Field(ge=1, le=255)], ...] = Field(
        default=(), max_length=255, description="try again after these exit codes"
    )
    on_oom: OomBody | None = None

    def to_policy(self) -> RetryPolicy:
        attempts = self.attempts
        if "attempts" not in self.model_fields_set and (self.exit_codes or self.on_oom is not None):
            attempts = 3
        oom = self.on_oom
        more = None if oom is None else OomRetry(oom.factor, oom.memory_max, oom.gpu_memory_max)
        return RetryPolicy(attempts, self.on_node_loss, self.on_failure, self.backoff, self.exit_codes, more)


class HealthBody(Incoming):
    path: str = Field(default="/health", pattern=r"^/[^\s]*$", max_length=1000)
    interval: DurationMs = Field(default=5_000, ge=100)
    timeout: DurationMs = Field(default=2_000, ge=50)
    failures: int = Field(default=3, ge=1, le=100)


class AfterBody(Incoming):
    """A task (or an array) that must have ended before. `task` is its id; inside a batch also the name of another task of it."""

    task: Name
    when: Literal["succeeded", "failed", "ended"] = "succeeded"


def _after(value: object) -> object:
    return {"task": value} if isinstance(value, str) else value


class TaskSubmission(Incoming):
    """One task to run. `command` is a program with its arguments, never a shell line; `image` runs it in a container."""

    name: Name
    type: Literal["training", "inference", "batch", "control"] = "batch"
    project: Slug = "default"
    priority: int = Field(default=50, ge=0, le=100, description="0 is last, 100 is first")
    command: tuple[Text, ...] = Field(default=(), max_length=4096)
    image: Annotated[str, Field(max_length=500, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$")] | None = None
    env: dict[EnvName, Text] = Field(default={}, max_length=1000)
    env_profile: Slug | None = Field(default=None, description="variables that the node adds, by the profile's name")
    working_dir: Path | None = None
    warm_preload: tuple[ModuleName, ...] | None = Field(
        default=None,
        max_length=50,
        description="modules imported once by a template on the node, of which this `python -m MODULE` command starts as a fork",
    )
    mounts: tuple[MountBody, ...] = Field(default=(), max_length=100)
    output_path: Path | None = None
    shared_memory: Bytes = Field(default=0, description="size of a container's /dev/shm; it counts as its memory")
    resources: Resources = Resources()
    members: int = Field(default=1, ge=1, le=10_000, description="more than one makes it a gang")
    members_min: int | None = Field(
        default=None, ge=1, le=10_000, description="an elastic gang starts with as many as fit, from this to members_max"
    )
    members_max: int | None = Field(default=None, ge=1, le=10_000, description="the same as members, beside members_min")
    spread: Literal["no", "prefer", "require"] = Field(default="no", description="members of a gang on different nodes")
    anti_affinity: Literal["no", "prefer", "require"] = Field(
        default="no", description="no node where another task of its group runs"
    )
    pools: tuple[Slug, ...] = Field(default=(), max_length=16)
    node_labels: dict[Label, Label] = Field(default={}, max_length=100)
    prefer_labels: dict[Label, Label] = Field(default={}, max_length=100, description="liked in a node, not demanded (affinity)")
    data_bytes: dict[Label, Bytes] = Field(
        default={}, max_length=10_000, description="by node: how much of the task's input lies there (affinity)"
    )
    quota_policy: Slug | None = None
    strategy: Slug | None = None
    time_limit: DurationMs | None = None
    checkpoint_every: DurationMs | None = Field(
        default=None, description="it saves its work at least so often and goes on from there when started again; 0: on SIGTERM"
    )
    gpu_idle_stop: Annotated[DurationMs, Field(ge=10_000)] | None = Field(
        default=None, description="stop it when none of its GPUs was used for so long; without it the task is only warned"
    )
    gpu_visible_devices: Literal["uuid", "index"] = Field(
        default="uuid", description="how CUDA_VISIBLE_DEVICES names its GPUs; index: for programs that can read numbers only"
    )
    grace: DurationMs = Field(default=10_000, le=3_600_000, description="from SIGTERM to SIGKILL")
    retry: RetryBody = RetryBody()
    on_disconnect: Literal["stop", "keep"] = "stop"
    ports: int = Field(default=0, ge=0, le=100, description="host ports wanted; the task finds them in CRATER_PORTS")
    after: tuple[Annotated[AfterBody, BeforeValidator(_after)], ...] = Field(
        default=(), max_length=1000, description="tasks to come after: ids, or {task, when: succeeded | failed | ended}"
    )
    group: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_no_nul)] | None = None
    labels: dict[Label, Label] = Field(default={}, max_length=100)

    @model_validator(mode="after")
    def _something_to_run(self) -> TaskSubmission:
        if not self.command and self.image is None:
            raise ValueError("command is missing: a program with its arguments, or an image that has its own")
        if self.command and not self.command[0]:
            raise ValueError("command must start with a program, found an empty text")
        if self.shared_memory and self.image is None:
            raise ValueError("shared_memory is for an image: without one a task uses the node's own /dev/shm")
        if self.shared_memory > self.resources.memory:
            raise ValueError(
                f"shared_memory counts as memory, so it can be resources.memory ({show_bytes(self.resources.memory)}) at most"
            )
        if self.warm_preload is not None and (self.image is not None or self.command[1:2] != ("-m",) or len(self.command) < 3):
            raise ValueError("warm_preload is for commands of the form: python -m MODULE ...")
        return self

    @model_validator(mode="after")
    def _members_make_sense(self) -> TaskSubmission:
        if self.members_max is not None and self.members not in (1, self.members_max):
            raise ValueError(f"members ({self.members}) and members_max ({self.members_max}) mean the same: give one")
        if self.members_min is not None and self.members_min > self.members_most:
            raise ValueError(f"members_min ({self.members_min}) must not be above members_max ({self.members_most})")
        return self

    @property
    def members_most(self) -> int:
        return self.members if self.members_max is None else self.members_max

    def to_spec(self, user: str) -> TaskSpec:
        return TaskSpec(
            name=self.name,
            type=TaskType(self.type),
            project=self.project,
            user=user,
            priority=self.priority,
            command=self.command,
            image=self.image,
            env=self.env,
            env_profile=self.env_profile,
            working_dir=self.working_dir,
            warm_preload=self.warm_preload,
            mounts=tuple(Mount(m.source, m.target, m.read_only) for m in self.mounts),
            output_path=self.output_path,
            shm_bytes=self.shared_memory,
            request=self.resources.to_request(self.ports),
            members=self.members_most,
            members_min=self.members_min,
            spread=Apart(self.spread),
            anti_affinity=Apart(self.anti_affinity),
            pools=self.pools,
            node_labels=self.node_labels,
            prefer_labels=self.prefer_labels,
            data_bytes=self.data_bytes,
            quota_policy=self.quota_policy,
            strategy=self.strategy,
            time_limit_ms=self.time_limit,
            checkpoint_every_ms=self.checkpoint_every,
            gpu_idle_stop_ms=self.gpu_idle_stop,
            gpu_visible_devices=VisibleDevices(self.gpu_visible_devices),
            grace_ms=self.grace,
            retry=self.retry.to_policy(),
            on_disconnect=OnDisconnect(self.on_disconnect),
            after=tuple(After(after.task, When(after.when)) for after in self.after),
            group=self.group,
            labels=self.labels,
        )


class TaskBatch(Incoming):
    """All are accepted, or none. `idempotency_keys`, where given, has one for each task."""

    tasks: tuple[TaskSubmission, ...] = Field(min_length=1, max_length=10_000)
    idempotency_keys: tuple[str, ...] | None = None


class CancelBody(Incoming):
    reason: str = Field(default="", max_length=1000)


class AfterView(Outgoing):
    task: str
    when: str


class TaskView(Outgoing):
    """A task as callers see it. Times are milliseconds since the epoch."""

    id: str
    name: str
    type: str
    status: str
    reason: ReasonView | None = None
    project: str
    user: str
    priority: int
    quota_policy: str | None = None
    group: str | None = None
    service: str | None = None
    array: str | None = None
    array_index: int | None = None
    after: list[AfterView] = []
    labels: dict[str, str] = {}
    command: list[str] = []
    image: str | None = None
    requested: AmountsView
    attempt: int = 0
    node: str | None = None
    allocation: str | None = None
    members: int = 1
    """Of a gang: how many it has in this attempt, or the most that it asks for while it waits."""
    members_asked: int = 1
    """What `requested` is the sum of."""
    gpu_count: int = 0
    """GPUs asked for by each member, whole ones or shares of so many."""
    gpu_exclusive: bool = False
    gpu_types: list[str] = []
    time_limit_ms: int | None = None
    checkpoint_every_ms: int | None = None
    nodes: list[str] = []
    """Where its members are, in their order."""
    allocations: list[str] = []
    """Of the last attempt, in the order of `nodes`."""
    devices: list[GrantView] = []
    ports: list[int] = []
    submitted_at_ms: int
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    waited_ms: int = 0
    ran_ms: int = 0
    exit_code: int | None = None
    ready: bool = False
    cancelling: bool = False
    preemptions: int = 0
    gpu_hours: float = 0.0
    core_hours: float = 0.0
    gb_hours: float = 0.0
    memory_peak_bytes: int = 0
    gpu_memory_peak_mib: int = 0
    cpu_percent_milli: int = 0
    gpu_memory_mib: int = 0
    """Now, over all its devices."""
    gpu_percent_milli: int = 0
    """GPU use over the last sample, in thousandths of a device, over all its devices."""
    gpu_busy_hours: float = 0.0
    """Of `gpu_hours`, the part in which a device computed for it."""
    gpu_idle_stop_ms: int | None = None
    revision: int = 0

    @property
    def ended(self) -> bool:
        return TaskStatus(self.status).ended

    def allocation_of(self, member: int) -> str | None:
        """Of one member of the last attempt; None where that attempt has no such member, or where there is none yet."""
        return self.allocations[member] if member < len(self.allocations) else None


def task_view(
    task: Task,
    allocations: Sequence[Allocation] = (),
    *,
    reason: Reason | None = None,
    now_ms: int,
    revision: int = 0,
) -> TaskView:
    """Show a task with the allocations of its last attempt (live or ended). `reason` overrides a waiting task's older one."""
    spec, first = task.spec, next((a for a in allocations if a.member == 0), None)
    until_ms = task.ended_at_ms if task.ended_at_ms is not None else now_ms
    queued = task.status is TaskStatus.QUEUED
    in_order = sorted(allocations, key=lambda a: a.member)
    held_hours = [(a.held, (a.ended_at_ms or now_ms) - a.assigned_at_ms) for a in allocations]
    return TaskView(
        id=task.id,
        name=spec.name,
        type=spec.type.value,
        status=task.status.value,
        reason=ReasonView.of(reason or task.reason),
        project=spec.project,
        user=spec.user,
        priority=spec.priority,
        quota_policy=spec.quota_policy,
        group=spec.group,
        service=spec.service,
        array=spec.array.id if spec.array is not None else None,
        array_index=task.array_index,
        after=[AfterView(task=after.task, when=after.when.value) for after in spec.after],
        labels=dict(spec.labels),
        command=list(spec.command),
        image=spec.image,
        requested=AmountsView.of(task.asked.request.amounts.times(spec.members)),
        attempt=task.attempt,
        node=first.node if first else None,
        allocation=first.id if first else None,
        members=len(allocations) or spec.members,
        members_asked=spec.members,
        gpu_count=spec.request.gpu.count if spec.request.gpu else 0,
        gpu_exclusive=spec.request.gpu is not None and spec.request.gpu.exclusive,
        gpu_types=list(spec.request.gpu.types) if spec.request.gpu else [],
        time_limit_ms=spec.time_limit_ms,
        checkpoint_every_ms=spec.checkpoint_every_ms,
        nodes=[a.node for a in in_order],
        allocations=[a.id for a in in_order],
        devices=[GrantView.of(grant) for a in allocations for grant in a.grants],
        ports=[port for a in allocations for port in a.ports[: spec.request.ports]],
        submitted_at_ms=task.submitted_at_ms,
        started_at_ms=task.started_at_ms,
        ended_at_ms=task.ended_at_ms,
        waited_ms=task.waited_ms + (max(0, now_ms - task.queued_at_ms) if queued else 0),
        ran_ms=max(0, until_ms - task.started_at_ms) if task.started_at_ms is not None else 0,
        exit_code=task.exit_code,
        ready=task.ready,
        cancelling=task.cancel_reason is not None and not task.status.ended,
        preemptions=task.preemptions,
        gpu_hours=_hours(held_hours, "gpu_milli", 1000),
        core_hours=_hours(held_hours, "cpu_milli", 1000),
        gb_hours=_hours(held_hours, "memory_bytes", 10**9),
        memory_peak_bytes=max((a.use.memory_peak_bytes for a in allocations), default=0),
        gpu_memory_peak_mib=max((a.use.gpu_memory_peak_mib for a in allocations), default=0),
        cpu_percent_milli=max((a.use.cpu_percent_milli for a in allocations), default=0),
        gpu_memory_mib=sum(a.use.gpu_memory_mib for a in allocations),
        gpu_percent_milli=sum(a.use.gpu_percent_milli for a in allocations),
        gpu_busy_hours=sum(a.use.gpu_busy_ms for a in allocations) / HOUR_MS,
        gpu_idle_stop_ms=spec.gpu_idle_stop_ms,
        revision=revision,
    )


def _hours(held: list[tuple[Amounts, int]], field: str, unit: int) -> float:
    return sum(getattr(amounts, field) / unit * max(0, ms) / HOUR_MS for amounts, ms in held)


class TaskPage(Outgoing):
    tasks: list[TaskView]
    next_cursor: str | None = None


class TaskChanges(Outgoing):
    """Tasks of a group (or any) that changed after `after`; ask again with `after=revision`."""

    revision: int
    tasks: list[TaskView]


class EventView(Outgoing):
    at_ms: int
    subject: str
    id: str
    what: str
    reason: ReasonView | None = None
    facts: dict[str, str | int] = {}
    group: str | None = None
    sequence: int = 0

    @staticmethod
    def of(event: Event, sequence: int = 0) -> EventView:
        return EventView(
            at_ms=event.at_ms,
            subject=event.subject,
            id=event.id,
            what=event.what,
            reason=ReasonView.of(event.reason),
            facts=dict(event.facts),
            group=event.group,
            sequence=sequence,
        )


class EventPage(Outgoing):
    events: list[EventView]


class CandidateView(Outgoing):
    node: str
    score: float | None = None
    rejection: ReasonView | None = None


class ExplanationView(Outgoing):
    task: str
    status: str
    strategy: str
    reason: ReasonView | None = None
    position: int | None = None
    candidates: list[CandidateView] = []
    expected_start_ms: int | None = None
    """Of a waiting task, if nothing comes and what runs ends as declared or foretold; None: unknown, see `expected_note`."""
    expected_sure: bool = False
    """Only declared time limits were counted on."""
    expected_note: str = ""

    @staticmethod
    def of(explanation: Explanation, status: str) -> ExplanationView:
        return ExplanationView(
            task=explanation.task,
            status=status,
            strategy=explanation.strategy,
            reason=ReasonView.of(explanation.reason),
            position=explanation.position,
            candidates=[
                CandidateView(node=c.node, score=c.score, rejection=ReasonView.of(c.rejection)) for c in explanation.candidates
            ],
        )


def health_check(body: HealthBody) -> HealthCheck:
    return HealthCheck(body.path, body.interval, body.timeout, body.failures)
