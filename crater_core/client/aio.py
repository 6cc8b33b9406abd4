"""The client for asyncio: the same calls and flows as the sync one, awaited."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from crater_core.client import calls, flows
from crater_core.client.calls import LOG_BYTES, Call, LogChunk, TaskQuery
from crater_core.client.flows import Emit, Step, Stream
from crater_core.client.sending import Attempt, Failure, Pause, Route, sending
from crater_core.client.settings import connection, endpoint_from_env, token_from_env
from crater_core.client.stream import EventLines
from crater_core.client.transport import AsyncTransport, Broken
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


class AsyncCraterClient:
    """Talks to a scheduler from asyncio: `CraterClient`'s methods, awaited. Opens no connection before the first call; each
    event loop gets its own.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        user: str | None = None,
        timeout_s: float = 10.0,
        retry_for_s: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = connection(endpoints, token, user, timeout_s, retry_for_s)
        self._transport = AsyncTransport(self._connection, transport)
        self._route = Route(self._connection.endpoints)
        self._monotonic_ms = SystemClock().monotonic_ms

    @classmethod
    def from_env(
        cls, endpoints: str | Sequence[str] | None = None, token: str | None = None, **options: Any
    ) -> AsyncCraterClient:
        """What is not given comes from CRATER_ENDPOINT and CRATER_TOKEN (or the file that CRATER_TOKEN_FILE names)."""
        return cls(endpoints or endpoint_from_env(), token or token_from_env(), **options)

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._connection.endpoints

    def __repr__(self) -> str:
        return f"AsyncCraterClient({', '.join(self.endpoints)})"

    async def __aenter__(self) -> AsyncCraterClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back; a later call opens new ones."""
        await self._transport.close()

    # Tasks

    async def submit(self, task: TaskSubmission | Mapping[str, Any], *, idempotency_key: str | None = None) -> TaskView:
        """Submit one task. The same key again gives the same task; without one, a fresh key guards the retries."""
        return await self._send(calls.submit(task, idempotency_key))

    async def submit_many(
        self, tasks: Iterable[TaskSubmission | Mapping[str, Any]], idempotency_keys: Sequence[str] | None = None
    ) -> list[TaskView]:
        """All of them, or none (10,000 at most)."""
        return await self._send(calls.submit_many(tasks, idempotency_keys))

    async def submit_array(
        self,
        task: TaskSubmission | Mapping[str, Any],
        indices: int | str | Sequence[int],
        *,
        running_max: int | None = None,
        idempotency_key: str | None = None,
    ) -> ArrayView:
        """Many tasks from one, each with CRATER_ARRAY_INDEX. `indices`: how many, "0-99", "1,4,7-9", or a list."""
        return await self._send(calls.submit_array(task, indices, running_max, idempotency_key))

    async def array(self, array_id: str, *, after: int | None = None, wait_s: float = 0.0) -> ArrayView:
        """An array as a whole; with `wait_s` the answer comes when a task of it has changed since revision `after`."""
        return await self._send(calls.array(array_id, after, wait_s))

    async def wait_array(self, array_id: str, timeout_s: float | None = None) -> ArrayView:
        """Until all of it has ended. Raises TimeoutError, with how many stand where."""
        return await self._run(flows.wait_array(array_id, timeout_s, self._monotonic_ms))

    async def cancel_array(self, array_id: str, reason: str = "") -> ArrayView:
        """End every task of it that waits or runs."""
        return await self._send(calls.cancel_array(array_id, reason))

    async def task(self, task_id: str, *, after: int | None = None, wait_s: float = 0.0) -> TaskView:
        """One task; with `wait_s` (60 at most) the answer comes when it has changed since revision `after`."""
        return await self._send(calls.task(task_id, after, wait_s))

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
    ) -> AsyncIterator[TaskView]:
        """Newest first, page by page as they are asked for."""
        wanted = TaskQuery(status, project, user, name, group, service, labels, key, array)
        return self._each(flows.all_tasks(wanted, limit))

    async def cancel(self, task_id: str, reason: str = "") -> TaskView:
        return await self._send(calls.cancel(task_id, reason))

    async def cancel_group(self, group: str, reason: str = "") -> list[TaskView]:
        """End every live task of the group; gives those that were live."""
        return await self._send(calls.cancel_group(group, reason))

    async def wait(
        self, task_id: str, timeout_s: float | None = None, on_change: Callable[[TaskView], object] | None = None
    ) -> TaskView:
        """Until the task has ended, however it ended. Raises TimeoutError, with what it is doing then."""
        return await self._run(flows.wait(task_id, timeout_s, on_change, self._monotonic_ms))

    async def changes(self, after: int | None, *, group: str | None = None, wait_s: float = 25.0) -> TaskChanges:
        """Tasks changed since a revision (None: from now); ask again with the answer's revision."""
        return await self._send(calls.changes(after, group, wait_s))

    async def events(self, task_id: str, after: int = 0) -> list[EventView]:
        return await self._run(flows.all_events(task_id, after))

    async def watch(
        self, group: str | None = None, *, after: int | None = None, subject: str | None = None
    ) -> AsyncIterator[EventView]:
        """Everything that happens, as it happens, for ever; after a break it goes on where it was."""
        reader = EventLines(after)
        while True:
            response: httpx.Response = await self._send(calls.watch(reader.last, group, subject))
            try:
                async for line in response.aiter_lines():
                    event = reader.feed(line)
                    if event is not None:
                        yield event
            except Broken:
                reader.broken()
            finally:
                await response.aclose()
            await self._do(Pause(0.2))

    async def logs(
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
        return await self._send(calls.logs(task_id, stream, offset, limit, wait_s, allocation))

    def follow_logs(self, task_id: str, member: int = 0) -> AsyncIterator[tuple[Stream, bytes]]:
        """Both streams as they are written, through every attempt, until the task has ended; of one member of a gang."""
        return self._each(flows.follow_logs(task_id, member))

    async def dry_run(self, tasks: Iterable[TaskSubmission | Mapping[str, Any]]) -> DryRun:
        """What would become of them, in this order, without submitting any: refused, placed and where, or waiting and why."""
        return await self._send(calls.dry_run(tasks))

    async def explain(self, task_id: str) -> ExplanationView:
        return await self._send(calls.explain(task_id))

    # The cluster

    async def health(self) -> Health:
        return await self._send(calls.health())

    async def leader(self) -> LeaderView:
        return await self._send(calls.leader())

    async def backup(self) -> bytes:
        """Everything that the scheduler remembers, as a file for `crater restore`; for administrators."""
        return await self._send(calls.backup())

    async def debug_snapshot(self) -> bytes:
        """What the scheduler's decisions see now, without secrets, as a file for `crater debug replay`; for administrators."""
        return await self._send(calls.debug_snapshot())

    async def nodes(self) -> list[NodeView]:
        return await self._send(calls.nodes())

    async def node(self, name: str) -> NodeView:
        return await self._send(calls.node(name))

    async def cordon(self, name: str) -> NodeView:
        return await self._send(calls.cordon(name, True))

    async def uncordon(self, name: str) -> NodeView:
        return await self._send(calls.cordon(name, False))

    async def drain(self, name: str, deadline: str | None = None, reason: str = "") -> NodeView:
        """Empty a node: nothing new, and what still runs after `deadline` ("10m"; None: never) is queued again elsewhere."""
        return await self._send(calls.drain(name, deadline, reason))

    async def pools(self) -> list[PoolView]:
        return await self._send(calls.pools())

    async def quotas(self) -> list[QuotaView]:
        return await self._send(calls.quotas())

    async def quota(self, name: str) -> QuotaView:
        return await self._send(calls.quota(name))

    async def set_quota(self, name: str, body: QuotaBody | Mapping[str, Any]) -> QuotaView:
        return await self._send(calls.set_quota(name, body))

    async def remove_quota(self, name: str) -> None:
        await self._send(calls.remove_quota(name))

    async def shares(self) -> SharePage:
        """What part of the cluster each project holds, and held on average lately: fair share goes by both."""
        return await self._send(calls.shares())

    async def usage(self, by: str = "project", from_ms: int | None = None, to_ms: int | None = None) -> UsageReport:
        """Hours held between two times, by project, user, quota_policy, node, task or name."""
        return await self._send(calls.usage(by, from_ms, to_ms))

    # Reservations

    async def reservations(self) -> list[ReservationView]:
        """What is reserved, the next first."""
        return await self._send(calls.reservations())

    async def reserve(self, body: ReservationBody | Mapping[str, Any]) -> ReservationView:
        """Reserve room for a project from one time to another. Raises ImpossibleRequest with the numbers."""
        return await self._send(calls.reserve(body))

    async def cancel_reservation(self, name: str) -> None:
        await self._send(calls.cancel_reservation(name))

    # Services

    async def services(self) -> list[ServiceView]:
        return await self._send(calls.services())

    async def service(self, name: str) -> ServiceView:
        return await self._send(calls.service(name))

    async def deploy(self, body: ServiceBody | Mapping[str, Any]) -> ServiceView:
        """Create the service, or roll it to this version; the same body again changes nothing."""
        return await self._send(calls.deploy(body))

    async def scale(self, name: str, replicas: int, reason: str = "") -> ServiceView:
        return await self._send(calls.scale(name, replicas, reason))

    async def remove_service(self, name: str) -> ServiceView:
        return await self._send(calls.remove_service(name))

    async def wait_service(self, name: str, timeout_s: float = 300.0) -> ServiceView:
        """Until every replica is ready. Raises TimeoutError with what holds the replicas up."""
        return await self._run(flows.wait_service(name, timeout_s, self._monotonic_ms))

    # How steps are carried out

    async def _send(self, call: Call[T]) -> T:
        attempts = sending(call, self._route, self._connection.retry_for_s, self._monotonic_ms, random.random)
        outcome: Any = None
        while True:
            try:
                step = attempts.send(outcome)
            except StopIteration as end:
                return end.value
            outcome = await self._do(step)

    async def _do(self, step: Attempt | Pause) -> calls.Answer | Failure | None:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        return await self._transport.exchange(step)

    async def _step(self, step: Step) -> tuple[Any, CraterError | None]:
        if isinstance(step, Pause):
            return await self._do(step), None
        assert isinstance(step, Call), "only `_each` passes values on"
        try:
            return await self._send(step), None
        except CraterError as error:
            return None, error

    async def _run(self, flow: Generator[Step, Any, T]) -> T:
        result, error = None, None
        while True:
            try:
                step = flow.throw(error) if error is not None else flow.send(result)
            except StopIteration as end:
                return end.value
            result, error = await self._step(step)

    async def _each(self, flow: Generator[Step, Any, None]) -> AsyncIterator[Any]:
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
                result, error = await self._step(step)
