"""The client for ordinary Python: each method is one call, or one flow, carried out on the spot."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from crater_core.client import calls, flows
from crater_core.client.calls import LOG_BYTES, Call, LogChunk, TaskQuery
from crater_core.client.flows import Emit, Step, Stream
from crater_core.client.sending import Attempt, Failure, Pause, Route, sending
from crater_core.client.settings import connection, endpoint_from_env, token_from_env
from crater_core.client.stream import EventLines
from crater_core.client.transport import Broken, SyncTransport
from crater_core.clock import SystemClock
from crater_core.errors import CraterError
from crater_core.wire.arrays import ArrayView
from crater_core.wire.nodes import NodeView, PoolView, QuotaBody, QuotaView
from crater_core.wire.reservations import ReservationBody, ReservationView
from crater_core.wire.services import ServiceBody, ServiceView
from crater_core.wire.tasks import EventView, ExplanationView, TaskChanges, TaskSubmission, TaskView
from crater_core.wire.usage import Health, LeaderView, SharePage, UsageReport
from crater_core.wire.whatif import DryRun

T = TypeVar("T")


class CraterClient:
    """Talks to a scheduler. Opens no connection before the first call; threads may share it, and a forked child may go on
    with it. Calls are sent again for `retry_for_s` while no scheduler answers; then SchedulerUnreachable is raised.

    `endpoints`: one address, several with commas, or a list; the leader is found by itself. `user`: for whom an
    administrator's token acts.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        user: str | None = None,
        timeout_s: float = 10.0,
        retry_for_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connection = connection(endpoints, token, user, timeout_s, retry_for_s)
        self._transport = SyncTransport(self._connection, transport)
        self._route = Route(self._connection.endpoints)
        self._monotonic_ms = SystemClock().monotonic_ms

    @classmethod
    def from_env(cls, endpoints: str | Sequence[str] | None = None, token: str | None = None, **options: Any) -> CraterClient:
        """What is not given comes from CRATER_ENDPOINT and CRATER_TOKEN (or the file that CRATER_TOKEN_FILE names)."""
        return cls(endpoints or endpoint_from_env(), token or token_from_env(), **options)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._connection.endpoints

    def __repr__(self) -> str:
        return f"CraterClient({', '.join(self.endpoints)})"

    def __enter__(self) -> CraterClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back; a later call opens new ones."""
        self._transport.close()

    # Tasks

    def submit(self, task: TaskSubmission | Mapping[str, Any], *, idempotency_key: str | None = None) -> TaskView:
        """Submit one task. The same key again gives the same task; without one, a fresh key guards the retries."""
        return self._send(calls.submit(task, idempotency_key))

    def submit_many(
        self, tasks: Iterable[TaskSubmission | Mapping[str, Any]], idempotency_keys: Sequence[str] | None = None
    ) -> list[TaskView]:
        """All of them, or none (10,000 at most)."""
        return self._send(calls.submit_many(tasks, idempotency_keys))

    def submit_array(
        self,
        task: TaskSubmission | Mapping[str, Any],
        indices: int | str | Sequence[int],
        *,
        running_max: int | None = None,
        idempotency_key: str | None = None,
    ) -> ArrayView:
        """Many tasks from one, each with CRATER_ARRAY_INDEX. `indices`: how many, "0-99", "1,4,7-9", or a list."""
        return self._send(calls.submit_array(task, indices, running_max, idempotency_key))

    def array(self, array_id: str, *, after: int | None = None, wait_s: float = 0.0) -> ArrayView:
        """An array as a whole; with `wait_s` the answer comes when a task of it has changed since revision `after`."""
        return self._send(calls.array(array_id, after, wait_s))

    def wait_array(self, array_id: str, timeout_s: float | None = None) -> ArrayView:
        """Until all of it has ended. Raises TimeoutError, with how many stand where."""
        return self._run(flows.wait_array(array_id, timeout_s, self._monotonic_ms))

    def cancel_array(self, array_id: str, reason: str = "") -> ArrayView:
        """End every task of it that waits or runs."""
        return self._send(calls.cancel_array(array_id, reason))

    def task(self, task_id: str, *, after: int | None = None, wait_s: float = 0.0) -> TaskView:
        """One task; with `wait_s` (60 at most) the answer comes when it has changed since revision `after`."""
        return self._send(calls.task(task_id, after, wait_s))

    def tasks(
        self,
        *,
        status: Sequence[str] = (),
        project: str | None = None,
        user: str | None = None,
        name: str | None = None,
        group: str | None = None,
        service: str | None = None,
        labels: Mapping[str, str] | None = None,
        key: str | None = None,
        array: str | None = None,
        limit: int | None = None,
    ) -> Iterator[TaskView]:
        """Newest first, page by page as they are asked for."""
        wanted = TaskQuery(status, project, user, name, group, service, labels, key, array)
        return self._each(flows.all_tasks(wanted, limit))

    def cancel(self, task_id: str, reason: str = "") -> TaskView:
        return self._send(calls.cancel(task_id, reason))

    def cancel_group(self, group: str, reason: str = "") -> list[TaskView]:
        """End every live task of the group; gives those that were live."""
        return self._send(calls.cancel_group(group, reason))

    def wait(
        self, task_id: str, timeout_s: float | None = None, on_change: Callable[[TaskView], object] | None = None
    ) -> TaskView:
        """Until the task has ended, however it ended. Raises TimeoutError, with what it is doing then."""
        return self._run(flows.wait(task_id, timeout_s, on_change, self._monotonic_ms))

    def changes(self, after: int | None, *, group: str | None = None, wait_s: float = 25.0) -> TaskChanges:
        """Tasks changed since a revision (None: from now); ask again with the answer's revision."""
        return self._send(calls.changes(after, group, wait_s))

    def events(self, task_id: str, after: int = 0) -> list[EventView]:
        return self._run(flows.all_events(task_id, after))

    def watch(self, group: str | None = None, *, after: int | None = None, subject: str | None = None) -> Iterator[EventView]:
        """Everything that happens, as it happens, for ever; after a break it goes on where it was."""
        reader = EventLines(after)
        while True:
            response: httpx.Response = self._send(calls.watch(reader.last, group, subject))
            try:
                for line in response.iter_lines():
                    event = reader.feed(line)
                    if event is not None:
                        yield event
            except Broken:
                reader.broken()
            finally:
                response.close()
            self._do(Pause(0.2))

    def logs(
        self,
        task_id: str,
        stream: Stream = "stdout",
        *,
        offset: int = 0,
        limit: int = LOG_BYTES,
        wait_s: float = 0.0,
        allocation: str | None = None,
    ) -> LogChunk:
        """A piece of the last attempt's output (or of `allocation`), from `offset` on."""
        return self._send(calls.logs(task_id, stream, offset, limit, wait_s, allocation))

    def follow_logs(self, task_id: str, member: int = 0) -> Iterator[tuple[Stream, bytes]]:
        """Both streams as they are written, through every attempt, until the task has ended; of one member of a gang."""
        return self._each(flows.follow_logs(task_id, member))

    def dry_run(self, tasks: Iterable[TaskSubmission | Mapping[str, Any]]) -> DryRun:
        """What would become of them, in this order, without submitting any: refused, placed and where, or waiting and why."""
        return self._send(calls.dry_run(tasks))

    def explain(self, task_id: str) -> ExplanationView:
        return self._send(calls.explain(task_id))

    # The cluster

    def health(self) -> Health:
        return self._send(calls.health())

    def leader(self) -> LeaderView:
        return self._send(calls.leader())

    def backup(self) -> bytes:
        """Everything that the scheduler remembers, as a file for `crater restore`; for administrators."""
        return self._send(calls.backup())

    def debug_snapshot(self) -> bytes:
        """What the scheduler's decisions see now, without secrets, as a file for `crater debug replay`; for administrators."""
        return self._send(calls.debug_snapshot())

    def nodes(self) -> list[NodeView]:
        return self._send(calls.nodes())

    def node(self, name: str) -> NodeView:
        return self._send(calls.node(name))

    def cordon(self, name: str) -> NodeView:
        return self._send(calls.cordon(name, True))

    def uncordon(self, name: str) -> NodeView:
        return self._send(calls.cordon(name, False))

    def drain(self, name: str, deadline: str | None = None, reason: str = "") -> NodeView:
        """Empty a node: nothing new, and what still runs after `deadline` ("10m"; None: never) is queued again elsewhere."""
        return self._send(calls.drain(name, deadline, reason))

    def pools(self) -> list[PoolView]:
        return self._send(calls.pools())

    def quotas(self) -> list[QuotaView]:
        return self._send(calls.quotas())

    def quota(self, name: str) -> QuotaView:
        return self._send(calls.quota(name))

    def set_quota(self, name: str, body: QuotaBody | Mapping[str, Any]) -> QuotaView:
        return self._send(calls.set_quota(name, body))

    def remove_quota(self, name: str) -> None:
        self._send(calls.remove_quota(name))

    def shares(self) -> SharePage:
        """What part of the cluster each project holds, and held on average lately: fair share goes by both."""
        return self._send(calls.shares())

    def usage(self, by: str = "project", from_ms: int | None = None, to_ms: int | None = None) -> UsageReport:
        """Hours held between two times, by project, user, quota_policy, node, task or name."""
        return self._send(calls.usage(by, from_ms, to_ms))

    # Reservations

    def reservations(self) -> list[ReservationView]:
        """What is reserved, the next first."""
        return self._send(calls.reservations())

    def reserve(self, body: ReservationBody | Mapping[str, Any]) -> ReservationView:
        """Reserve room for a project from one time to another. Raises ImpossibleRequest with the numbers."""
        return self._send(calls.reserve(body))

    def cancel_reservation(self, name: str) -> None:
        self._send(calls.cancel_reservation(name))

    # Services

    def services(self) -> list[ServiceView]:
        return self._send(calls.services())

    def service(self, name: str) -> ServiceView:
        return self._send(calls.service(name))

    def deploy(self, body: ServiceBody | Mapping[str, Any]) -> ServiceView:
        """Create the service, or roll it to this version; the same body again changes nothing."""
        return self._send(calls.deploy(body))

    def scale(self, name: str, replicas: int, reason: str = "") -> ServiceView:
        return self._send(calls.scale(name, replicas, reason))

    def remove_service(self, name: str) -> ServiceView:
        return self._send(calls.remove_service(name))

    def wait_service(self, name: str, timeout_s: float = 300.0) -> ServiceView:
        """Until every replica is ready. Raises TimeoutError with what holds the replicas up."""
        return self._run(flows.wait_service(name, timeout_s, self._monotonic_ms))

    # How steps are carried out

    def _send(self, call: Call[T]) -> T:
        attempts = sending(call, self._route, self._connection.retry_for_s, self._monotonic_ms, random.random)
        outcome: Any = None
        while True:
            try:
                step = attempts.send(outcome)
            except StopIteration as end:
                return end.value
            outcome = self._do(step)

    def _do(self, step: Attempt | Pause) -> calls.Answer | Failure | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        return self._transport.exchange(step)

    def _step(self, step: Step) -> tuple[Any, CraterError | None]:
        if isinstance(step, Pause):
            return self._do(step), None
        assert isinstance(step, Call), "only `_each` passes values on"
        try:
            return self._send(step), None
        except CraterError as error:
            return None, error

    def _run(self, flow: Generator[Step, Any, T]) -> T:
        result, error = None, None
        while True:
            try:
                step = flow.throw(error) if error is not None else flow.send(result)
            except StopIteration as end:
                return end.value
            result, error = self._step(step)

    def _each(self, flow: Generator[Step, Any, None]) -> Iterator[Any]:
        result, error = None, None
        while True:
            try:
                step = flow.throw(error) if error is not None else flow.send(result)
            except StopIteration:
                return
            if isinstance(step, Emit):
                result, error = None, None
                yield step.value
            else:
                result, error = self._step(step)
