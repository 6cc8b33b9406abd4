"""The Python API in the data platform's words: a cluster, a training task, an online service, their states and events.

Amounts are what the platform's forms hold: GPUs and cores as numbers, memory and disk in GB (10**9 bytes). Every submission
carries an external id, so that sending it again gives the same task.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from crater_core.client import CraterClient
from crater_core.client.flows import Stream
from crater_core.clock import SystemClock
from crater_core.errors import CraterError, InvalidRequest, NotFound
from crater_core.wire.nodes import PoolView
from crater_core.wire.services import ServiceView
from crater_core.wire.tasks import TaskView

GB = 10**9
KEY = "alldata:"
EXTERNAL_ID, PORT = "alldata.external_id", "alldata.port"
_TASK_ID = re.compile(r"t[0-9a-z]{18}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_OUR_WORDS = {
    "resources.memory": "memory_gb",
    "resources.disk": "disk_gb",
    "resources.gpu_memory": "gpu_memory_gb",
    "resources.cpu": "cpu",
    "resources.gpu": "gpu",
    "resources.gpu_type": "gpu_type",
    "output_path": "output",
    "health.path": "health_path",
    "idempotency_key": "external_id",
}


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Cluster:
    """A Crater cluster as the platform's administrator adds it. `sync_interval_s`: how old an overview may be."""

    name: str
    scheduler_address: str | Sequence[str]
    token: str | None = field(default=None, repr=False)
    sync_interval_s: float = 30

    def __post_init__(self) -> None:
        _must(bool(_NAME.fullmatch(self.name)), "name", self.name, "1 to 100 letters, digits, dots, dashes and underscores")
        _number("sync_interval_s", self.sync_interval_s, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    name: str
    image: str | None = None
    command: Sequence[str] = ()
    """A program and its arguments; may be left out with an image that has its own."""
    cpu: float = 1
    memory_gb: float = 1
    disk_gb: float = 0
    gpu: float = 0
    """2 is two whole GPUs, 0.25 a share of one."""
    gpu_memory_gb: float = 0
    """Memory of a shared GPU."""
    gpu_type: Sequence[str] = ()
    gpu_visible_devices: Literal["uuid", "index"] = "uuid"
    """How CUDA_VISIBLE_DEVICES names its GPUs; index: for programs that can read numbers only."""
    quota_policy: str | None = None
    project: str = "default"
    priority: int = 50
    mounts: Mapping[str, str] = field(default_factory=lambda: {})
    """Path on the node to path in the task, read-only."""
    env: Mapping[str, str] = field(default_factory=lambda: {})
    labels: Mapping[str, str] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        _must(not isinstance(self.command, str), "command", self.command, "a list of words")
        _must(bool(self.command or self.image), "image", self.image, "given, or else a command")
        for name in ("cpu", "memory_gb"):
            _number(name, getattr(self, name), above=0)
        for name in ("disk_gb", "gpu", "gpu_memory_gb"):
            _number(name, getattr(self, name))
        _must(self.gpu_visible_devices in ("uuid", "index"), "gpu_visible_devices", self.gpu_visible_devices, "uuid or index")
        for source, target in self.mounts.items():
            for path in (source, target):
                _must(path.startswith("/") and ".." not in path.split("/"), "mounts", path, "absolute paths without '..'")

    def _body(self) -> dict[str, Any]:
        resources: dict[str, Any] = {
            "cpu": self.cpu,
            "memory": f"{_plain(self.memory_gb)}GB",
            "disk": f"{_plain(self.disk_gb)}GB",
        }
        if self.gpu:
            resources["gpu"] = self.gpu
        if self.gpu_memory_gb:
            resources["gpu_memory"] = f"{_plain(self.gpu_memory_gb)}GB"
        if self.gpu_type:
            resources["gpu_type"] = self.gpu_type if isinstance(self.gpu_type, str) else list(self.gpu_type)
        return {
            "name": self.name,
            "project": self.project,
            "priority": self.priority,
            "command": list(self.command),
            "image": self.image,
            "resources": resources,
            "quota_policy": self.quota_policy,
            "gpu_visible_devices": self.gpu_visible_devices,
            "mounts": [{"source": source, "target": target} for source, target in self.mounts.items()],
            "env": dict(self.env),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTask(_Work):
    """A model to train. `external_id` is the platform's own; a task object made without one keeps the one it is given."""

    output: str | None = None
    """Path whose content is the result."""
    time_limit_s: float | None = None
    retries: int = 0
    """How often to try again when it fails; a lost node is no failure and always leads to another try."""
    external_id: str = field(default_factory=_new_id)

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        _must(0 < len(self.external_id) <= 180, "external_id", self.external_id, "1 to 180 characters")
        _number("retries", self.retries)

    def body(self) -> dict[str, Any]:
        more = {"time_limit": self.time_limit_s} if self.time_limit_s is not None else {}
        return {
            **self._body(),
            **more,
            "type": "training",
            "output_path": self.output,
            "retry": {"attempts": self.retries + 1, "on_failure": self.retries > 0},
            "labels": {**self.labels, EXTERNAL_ID: self.external_id},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineService(_Work):
    """A model to serve. Its name is its identity. `port` is the one the platform shows: each replica listens on a port of its
    node that Crater gives it, in CRATER_PORT and wherever its command says {port}."""

    replicas: int = 2
    port: int = 8000
    health_path: str = "/health"

    def __post_init__(self) -> None:
        _Work.__post_init__(self)
        _must(bool(_NAME.fullmatch(self.name)), "name", self.name, "1 to 100 letters, digits, dots, dashes and underscores")
        _must(0 < self.port < 65_536, "port", self.port, "1 to 65535")
        _must(0 <= self.replicas <= 1000, "replicas", self.replicas, "0 to 1000")
        _must(self.health_path.startswith("/"), "health_path", self.health_path, "a path such as /health")

    def body(self) -> dict[str, Any]:
        return {
            **self._body(),
            "type": "inference",
            "replicas": self.replicas,
            "health": {"path": self.health_path},
            "labels": {**self.labels, PORT: str(self.port)},
        }


@dataclass(frozen=True, slots=True)
class TaskState:
    external_id: str
    task_id: str
    name: str
    state: str
    """queued, allocated, running, succeeded, failed, cancelled or refused."""
    why: str
    """Why it waits, or why it ended."""
    next_step: str
    """What a person can do about it; empty when there is nothing."""
    node: str | None
    gpus: tuple[str, ...]
    """UUIDs of its GPUs."""
    waited_s: float
    ran_s: float
    gpu_hours: float
    core_hours: float
    exit_code: int | None

    @property
    def ended(self) -> bool:
        return self.state in ("succeeded", "failed", "cancelled", "refused")


@dataclass(frozen=True, slots=True)
class ReplicaState:
    task_id: str
    state: str
    ready: bool
    node: str | None
    url: str | None
    why: str


@dataclass(frozen=True, slots=True)
class ServiceState:
    name: str
    state: str
    """deploying, ready, degraded or removing."""
    replicas: int
    ready: int
    version: int
    cpu_percent: float | None
    replica_states: tuple[ReplicaState, ...]


@dataclass(frozen=True, slots=True)
class TaskEvent:
    at_ms: int
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class PoolState:
    """`total` and `free` in `unit`: GPU, cores or GB."""

    name: str
    kind: Literal["gpu", "cpu", "memory", "disk"]
    total: float
    free: float
    unit: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Overview:
    cluster: str
    at_ms: int
    pools: tuple[PoolState, ...]
    nodes_ready: int
    tasks_queued: int
    tasks_running: int


class AllDataClient:
    """One cluster, seen from the platform. `user`: for whom, with an administrator's token."""

    def __init__(self, cluster: Cluster, *, user: str | None = None) -> None:
        self.cluster = cluster
        self._crater = CraterClient(cluster.scheduler_address, cluster.token, user=user)
        self._clock = SystemClock()
        self._overview: tuple[int, Overview] | None = None
        self._of_users: dict[str, AllDataClient] = {}

    def __enter__(self) -> AllDataClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back, those of `for_user` too; a later call opens new ones."""
        self._crater.close()
        for client in self._of_users.values():
            client.close()

    def for_user(self, user: str) -> AllDataClient:
        """The same cluster, for another user of the platform."""
        return self._of_users.setdefault(user, AllDataClient(self.cluster, user=user))

    def overview(self, *, fresh: bool = False) -> Overview:
        """Each pool's free amounts. Asks the scheduler at most once in `sync_interval_s`, unless `fresh`."""
        asked_at_ms = self._clock.monotonic_ms()
        if not fresh and self._overview is not None and asked_at_ms - self._overview[0] < self.cluster.sync_interval_s * 1000:
            return self._overview[1]
        health, pools = self._crater.health(), self._crater.pools()
        found = Overview(
            self.cluster.name,
            self._clock.now_ms(),
            tuple(_pool(view) for view in pools),
            health.nodes_ready,
            health.tasks_queued,
            health.tasks_running,
        )
        self._overview = (asked_at_ms, found)
        return found

    # Training tasks; `task` is an external id, a task id, or a state that was given before

    def submit_training(self, task: TrainingTask) -> TaskState:
        """Submit it, or find it when it was submitted before. Raises InvalidRequest or Denied with `field` in these words."""
        try:
            return _task(self._crater.submit(task.body(), idempotency_key=KEY + task.external_id))
        except CraterError as error:
            raise _in_our_words(error) from None

    def state(self, task: TaskState | str) -> TaskState:
        return _task(self._find(task))

    def wait(self, task: TaskState | str, timeout_s: float | None = None) -> TaskState:
        """Until it has ended, however it ended. Raises TimeoutError."""
        return _task(self._crater.wait(self._id(task), timeout_s))

    def cancel(self, task: TaskState | str, reason: str = "") -> TaskState:
        return _task(self._crater.cancel(self._id(task), reason))

    def events(self, task: TaskState | str) -> list[TaskEvent]:
        """Its history, oldest first."""
        found = self._crater.events(self._id(task))
        return [TaskEvent(event.at_ms, event.what, event.reason.message if event.reason else "") for event in found]

    def logs(self, task: TaskState | str, stream: Stream = "stdout") -> Iterator[str]:
        """What it has written so far, in pieces of at most a mebibyte."""
        task_id, offset = self._id(task), 0
        while True:
            chunk = self._crater.logs(task_id, stream, offset=offset)
            if not chunk.data:
                return
            offset = chunk.next_offset
            yield chunk.data.decode("utf-8", "replace")

    def follow(self, task: TaskState | str) -> Iterator[tuple[Stream, str]]:
        """Both streams as they are written, until it has ended."""
        for stream, data in self._crater.follow_logs(self._id(task)):
            yield stream, data.decode("utf-8", "replace")

    # Online services, by name

    def deploy_service(self, service: OnlineService) -> ServiceState:
        """Deploy it, or roll it to this version; the same again changes nothing."""
        try:
            return _service(self._crater.deploy(service.body()))
        except CraterError as error:
            raise _in_our_words(error) from None

    def service_state(self, name: str) -> ServiceState:
        return _service(self._crater.service(name))

    def wait_service(self, name: str, timeout_s: float = 300) -> ServiceState:
        """Until every replica is ready. Raises TimeoutError with what holds the replicas up."""
        return _service(self._crater.wait_service(name, timeout_s))

    def scale(self, name: str, replicas: int, reason: str = "") -> ServiceState:
        return _service(self._crater.scale(name, replicas, reason))

    def remove(self, name: str) -> ServiceState:
        return _service(self._crater.remove_service(name))

    def _find(self, task: TaskState | str) -> TaskView:
        if isinstance(task, TaskState):
            return self._crater.task(task.task_id)
        if _TASK_ID.fullmatch(task):
            return self._crater.task(task)
        found = next(self._crater.tasks(key=KEY + task, limit=1), None)
        if found is None:
            raise NotFound(f"no task has the external id {task}", external_id=task)
        return found

    def _id(self, task: TaskState | str) -> str:
        return task.task_id if isinstance(task, TaskState) else self._find(task).id


def _task(view: TaskView) -> TaskState:
    return TaskState(
        external_id=view.labels.get(EXTERNAL_ID, ""),
        task_id=view.id,
        name=view.name,
        state=view.status,
        why=view.reason.message if view.reason else "",
        next_step=view.reason.next_step if view.reason else "",
        node=view.node,
        gpus=tuple(grant.uuid for grant in view.devices),
        waited_s=view.waited_ms / 1000,
        ran_s=view.ran_ms / 1000,
        gpu_hours=view.gpu_hours,
        core_hours=view.core_hours,
        exit_code=view.exit_code,
    )


def _service(view: ServiceView) -> ServiceState:
    replicas = tuple(
        ReplicaState(r.task, r.status, r.ready, r.node, r.url, r.reason.message if r.reason else "") for r in view.replica_list
    )
    return ServiceState(view.name, view.status, view.replicas, view.ready, view.generation, view.cpu_percent, replicas)


def _pool(view: PoolView) -> PoolState:
    total, free, unit, one = {
        "gpu": (view.capacity.gpu_milli, view.free.gpu_milli, "GPU", 1000),
        "cpu": (view.capacity.cpu_milli, view.free.cpu_milli, "cores", 1000),
        "memory": (view.capacity.memory_bytes, view.free.memory_bytes, "GB", GB),
        "disk": (view.capacity.disk_bytes, view.free.disk_bytes, "GB", GB),
    }[view.kind]
    kind: Any = view.kind
    return PoolState(view.name, kind, total / one, free / one, unit, len(view.nodes))


def _in_our_words(error: CraterError) -> CraterError:
    """The same error with the field as it is called here."""
    theirs = str(error.fields.get("field") or "")
    ours = _OUR_WORDS.get(theirs)
    if ours is None:
        return error
    return type(error)(error.message.replace(f"{theirs}:", f"{ours}:", 1), **{**error.fields, "field": ours})


def _must(right: bool, name: str, found: object, expected: str) -> None:
    if not right:
        raise InvalidRequest(f"{name} must be {expected}, found {found!r:.100}", field=name, found=found, expected=expected)


def _number(name: str, value: Any, above: float | None = None) -> None:
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    right = right and (value >= 0 if above is None else value > above)
    _must(right, name, value, "a number from 0" if above is None else f"a number above {above:g}")


def _plain(number: float) -> str:
    """Without an exponent, to the byte."""
    return f"{number:.9f}".rstrip("0").rstrip(".")
