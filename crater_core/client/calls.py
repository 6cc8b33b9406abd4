"""One HTTP exchange as a value: what to send, and how to read the answer. Pure; the sync and the async client share it.

Every call may be sent twice: reads change nothing, `PUT`, cancel, cordon and scale come to the same, and a submit always
carries an idempotency key.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from crater_core.client.bodies import body_of, checked_header
from crater_core.errors import InvalidRequest
from crater_core.wire.arrays import ArraySubmission, ArrayView
from crater_core.wire.nodes import NodePage, NodeView, PoolPage, PoolView, QuotaBody, QuotaPage, QuotaView
from crater_core.wire.reservations import ReservationBody, ReservationPage, ReservationView
from crater_core.wire.services import ServiceBody, ServicePage, ServiceView
from crater_core.wire.tasks import EventPage, EventView, ExplanationView, TaskChanges, TaskPage, TaskSubmission, TaskView
from crater_core.wire.usage import Health, LeaderView, SharePage, UsageReport
from crater_core.wire.whatif import DryRun

T = TypeVar("T")
View = TypeVar("View", bound=BaseModel)
Query = tuple[tuple[str, str], ...]
PAGE = 500
LOG_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class Answer:
    """`headers` by lower-case name; `stream` is the open response of a call that streams."""

    status: int
    headers: Mapping[str, str]
    content: bytes
    stream: Any = None


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    method: str
    path: str
    parse: Callable[[Answer], T]
    query: Query = ()
    body: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    wait_s: float = 0.0
    """How long the scheduler may hold the answer back."""
    patience_s: float | None = None
    """Retry for this long instead of the client's own time."""
    streams: bool = False
    gone_is_done: bool = False
    """On a repeat, "not found" means that the first try worked and its answer was lost."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of output. Read on from `next_offset`; `complete`: there will never be more."""

    data: bytes
    next_offset: int
    complete: bool


def _view(model: type[View]) -> Callable[[Answer], View]:
    return lambda answer: model.model_validate_json(answer.content)


def _part(value: str, field: str) -> str:
    """One segment of a path; nothing in it can climb out."""
    if not value or value in (".", ".."):
        raise InvalidRequest(f"{field} is missing: found {value!r}", field=field)
    return quote(value, safe="")


def _query(**values: str | int | float | None) -> Query:
    return tuple((name, str(value)) for name, value in values.items() if value is not None)


def _get(path: str, model: type[View], query: Query = (), wait_s: float = 0.0) -> Call[View]:
    return Call("GET", path, _view(model), query, wait_s=wait_s)


def _post(path: str, model: type[View], body: Mapping[str, object] | None = None) -> Call[View]:
    return Call("POST", path, _view(model), body=json.dumps(body or {}).encode())


# Tasks


def submit(task: TaskSubmission | Mapping[str, Any], idempotency_key: str | None) -> Call[TaskView]:
    key = checked_header(idempotency_key or new_key(), "idempotency_key")
    body = body_of(TaskSubmission, task).model_dump_json(exclude_unset=True).encode()
    return Call("POST", "/v1/tasks", _view(TaskView), body=body, headers=(("Idempotency-Key", key),))


def submit_many(tasks: Iterable[TaskSubmission | Mapping[str, Any]], keys: Sequence[str] | None) -> Call[list[TaskView]]:
    bodies = [
        body_of(TaskSubmission, task, f"tasks.{index}").model_dump_json(exclude_unset=True) for index, task in enumerate(tasks)
    ]
    given = list(keys) if keys is not None else [new_key() for _ in bodies]
    if len(given) != len(bodies):
        raise InvalidRequest(
            f"idempotency_keys has {len(given)} keys for {len(bodies)} tasks: give one for each", field="idempotency_keys"
        )
    body = f'{{"tasks":[{",".join(bodies)}],"idempotency_keys":{json.dumps(given)}}}'
    return Call("POST", "/v1/tasks:batch", lambda answer: _view(TaskPage)(answer).tasks, body=body.encode())


def dry_run(tasks: Iterable[TaskSubmission | Mapping[str, Any]]) -> Call[DryRun]:
    bodies = [
        body_of(TaskSubmission, task, f"tasks.{index}").model_dump_json(exclude_unset=True) for index, task in enumerate(tasks)
    ]
    return Call("POST", "/v1/tasks:dry-run", _view(DryRun), body=f'{{"tasks":[{",".join(bodies)}]}}'.encode())


def new_key() -> str:
    return uuid.uuid4().hex


def task(task_id: str, after: int | None = None, wait_s: float = 0.0) -> Call[TaskView]:
    query = _query(after=after, wait=wait_s or None)
    return _get(f"/v1/tasks/{_part(task_id, 'id')}", TaskView, query, wait_s)


@dataclass(frozen=True, slots=True)
class TaskQuery:
    """Which tasks to list; None and empty leave a thing open."""

    status: Sequence[str] = ()
    project: str | None = None
    user: str | None = None
    name: str | None = None
    group: str | None = None
    service: str | None = None
    labels: Mapping[str, str] | None = None
    key: str | None = None
    array: str | None = None

    @property
    def query(self) -> Query:
        plain = _query(
            project=self.project,
            user=self.user,
            name=self.name,
            group=self.group,
            service=self.service,
            key=self.key,
            array=self.array,
        )
        statuses = (self.status,) if isinstance(self.status, str) else self.status
        several = [("status", str(status)) for status in statuses]
        several += [("label", f"{name}={value}") for name, value in (self.labels or {}).items()]
        return (*plain, *several)


def tasks(wanted: TaskQuery, limit: int, cursor: str | None) -> Call[TaskPage]:
    return _get("/v1/tasks", TaskPage, (*wanted.query, *_query(limit=limit, cursor=cursor)))


def submit_array(
    task: TaskSubmission | Mapping[str, Any], indices: object, running_max: int | None, idempotency_key: str | None
) -> Call[ArrayView]:
    key = checked_header(idempotency_key or new_key(), "idempotency_key")
    one = body_of(TaskSubmission, task, "task")
    whole = body_of(ArraySubmission, {"task": one, "indices": indices, "running_max": running_max})
    body = whole.model_dump_json(exclude_unset=True).encode()
    return Call("POST", "/v1/arrays", _view(ArrayView), body=body, headers=(("Idempotency-Key", key),))


def array(array_id: str, after: int | None = None, wait_s: float = 0.0) -> Call[ArrayView]:
    return _get(f"/v1/arrays/{_part(array_id, 'id')}", ArrayView, _query(after=after, wait=wait_s or None), wait_s)


def cancel_array(array_id: str, reason: str) -> Call[ArrayView]:
    return _post(f"/v1/arrays/{_part(array_id, 'id')}/cancel", ArrayView, {"reason": reason})


def cancel(task_id: str, reason: str) -> Call[TaskView]:
    return _post(f"/v1/tasks/{_part(task_id, 'id')}/cancel", TaskView, {"reason": reason})


def cancel_group(group: str, reason: str) -> Call[list[TaskView]]:
    path, body = f"/v1/groups/{_part(group, 'group')}/cancel", json.dumps({"reason": reason}).encode()
    return Call("POST", path, lambda answer: _view(TaskPage)(answer).tasks, body=body)


def changes(after: int | None, group: str | None, wait_s: float) -> Call[TaskChanges]:
    return _get("/v1/changes", TaskChanges, _query(after=after, group=group, wait=wait_s or None), wait_s)


def events(task_id: str, after: int, limit: int = PAGE) -> Call[list[EventView]]:
    path = f"/v1/tasks/{_part(task_id, 'id')}/events"
    return Call("GET", path, lambda answer: _view(EventPage)(answer).events, _query(after=after, limit=limit))


def watch(after: int | None, group: str | None, subject: str | None) -> Call[Any]:
    query = _query(after=after, group=group, subject=subject)
    return Call("GET", "/v1/events", lambda answer: answer.stream, query, wait_s=35.0, streams=True)


def explain(task_id: str) -> Call[ExplanationView]:
    return _get(f"/v1/tasks/{_part(task_id, 'id')}/explain", ExplanationView)


def logs(
    task_id: str,
    stream: str = "stdout",
    offset: int = 0,
    limit: int = LOG_BYTES,
    wait_s: float = 0.0,
    allocation: str | None = None,
    patience_s: float | None = None,
) -> Call[LogChunk]:
    query = _query(stream=stream, offset=offset, limit=limit, wait=wait_s or None, allocation=allocation)
    path = f"/v1/tasks/{_part(task_id, 'id')}/logs"
    return Call("GET", path, lambda answer: _log_chunk(answer, offset), query, wait_s=wait_s, patience_s=patience_s)


def _log_chunk(answer: Answer, offset: int) -> LogChunk:
    after = int(answer.headers.get("crater-next-offset", offset + len(answer.content)))
    return LogChunk(answer.content, after, answer.headers.get("crater-complete") == "true")


# The cluster


def leader() -> Call[LeaderView]:
    return _get("/v1/leader", LeaderView)


def backup() -> Call[bytes]:
    return Call("GET", "/v1/backup", lambda answer: answer.content, wait_s=600.0)


def debug_snapshot() -> Call[bytes]:
    return Call("GET", "/v1/snapshot", lambda answer: answer.content, wait_s=600.0)


def health() -> Call[Health]:
    return _get("/health", Health)


def nodes() -> Call[list[NodeView]]:
    return Call("GET", "/v1/nodes", lambda answer: _view(NodePage)(answer).nodes)


def node(name: str) -> Call[NodeView]:
    return _get(f"/v1/nodes/{_part(name, 'node')}", NodeView)


def cordon(name: str, on: bool) -> Call[NodeView]:
    return _post(f"/v1/nodes/{_part(name, 'node')}/{'cordon' if on else 'uncordon'}", NodeView)


def drain(name: str, deadline: str | None, reason: str) -> Call[NodeView]:
    return _post(f"/v1/nodes/{_part(name, 'node')}/drain", NodeView, {"deadline": deadline, "reason": reason})


def pools() -> Call[list[PoolView]]:
    return Call("GET", "/v1/pools", lambda answer: _view(PoolPage)(answer).pools)


def quotas() -> Call[list[QuotaView]]:
    return Call("GET", "/v1/quotas", lambda answer: _view(QuotaPage)(answer).quotas)


def quota(name: str) -> Call[QuotaView]:
    return _get(f"/v1/quotas/{_part(name, 'name')}", QuotaView)


def set_quota(name: str, body: QuotaBody | Mapping[str, Any]) -> Call[QuotaView]:
    data = body_of(QuotaBody, body).model_dump_json(exclude_unset=True).encode()
    return Call("PUT", f"/v1/quotas/{_part(name, 'name')}", _view(QuotaView), body=data)


def remove_quota(name: str) -> Call[None]:
    return Call("DELETE", f"/v1/quotas/{_part(name, 'name')}", lambda answer: None, gone_is_done=True)


def shares() -> Call[SharePage]:
    return _get("/v1/shares", SharePage)


def usage(by: str, from_ms: int | None, to_ms: int | None) -> Call[UsageReport]:
    return _get("/v1/usage", UsageReport, _query(by=by, from_ms=from_ms, to_ms=to_ms))


# Reservations


def reservations() -> Call[list[ReservationView]]:
    return Call("GET", "/v1/reservations", lambda answer: _view(ReservationPage)(answer).reservations)


def reserve(body: ReservationBody | Mapping[str, Any]) -> Call[ReservationView]:
    """With a name made here, so that a repeat is known for one."""
    wanted = body_of(ReservationBody, body)
    named = wanted.model_copy(update={"name": wanted.name or f"r{new_key()[:12]}"})
    data = named.model_dump_json(exclude_none=True).encode()
    return Call("POST", "/v1/reservations", _view(ReservationView), body=data)


def cancel_reservation(name: str) -> Call[None]:
    return Call("DELETE", f"/v1/reservations/{_part(name, 'name')}", lambda answer: None, gone_is_done=True)


# Services


def services() -> Call[list[ServiceView]]:
    return Call("GET", "/v1/services", lambda answer: _view(ServicePage)(answer).services)


def service(name: str) -> Call[ServiceView]:
    return _get(f"/v1/services/{_part(name, 'name')}", ServiceView)


def deploy(body: ServiceBody | Mapping[str, Any]) -> Call[ServiceView]:
    wanted = body_of(ServiceBody, body)
    data = wanted.model_dump_json(exclude_unset=True).encode()
    return Call("PUT", f"/v1/services/{_part(wanted.name, 'name')}", _view(ServiceView), body=data)


def scale(name: str, replicas: int, reason: str) -> Call[ServiceView]:
    return _post(f"/v1/services/{_part(name, 'name')}/scale", ServiceView, {"replicas": replicas, "reason": reason})


def remove_service(name: str) -> Call[ServiceView]:
    return Call("DELETE", f"/v1/services/{_part(name, 'name')}", _view(ServiceView))
