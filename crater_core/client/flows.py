"""What takes more than one call: waiting, paging, following output. Generators without I/O that both clients drive.

A flow yields a `Call` (and is sent its result, or its CraterError is raised there), a `Pause`, or an `Emit` for the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from crater_core.client import calls
from crater_core.client.calls import Call, LogChunk, TaskQuery
from crater_core.client.sending import Pause
from crater_core.errors import Conflict, NotFound, Unavailable
from crater_core.wire.arrays import ArrayView
from crater_core.wire.services import ServiceView
from crater_core.wire.tasks import EventView, TaskView

T = TypeVar("T")
Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
POLL_S = 25.0
"""How long one long poll lasts; what sits between may cut longer ones."""


@dataclass(frozen=True, slots=True)
class Emit(Generic[T]):
    value: T


Step = Call[Any] | Pause | Emit[Any]
Monotonic = Callable[[], int]


def ask(call: Call[T]) -> Generator[Step, Any, T]:
    result: T = yield call
    return result


def all_tasks(wanted: TaskQuery, limit: int | None) -> Generator[Step, Any, None]:
    cursor: str | None = None
    left = limit
    while left is None or left > 0:
        size = calls.PAGE if left is None else min(left, calls.PAGE)
        page = yield from ask(calls.tasks(wanted, size, cursor))
        for task in page.tasks:
            yield Emit(task)
        left = None if left is None else left - len(page.tasks)
        cursor = page.next_cursor
        if cursor is None:
            return


def all_events(task_id: str, after: int) -> Generator[Step, Any, list[EventView]]:
    found: list[EventView] = []
    while True:
        page = yield from ask(calls.events(task_id, found[-1].sequence if found else after))
        found += page
        if len(page) < calls.PAGE:
            return found


def wait(
    task_id: str, timeout_s: float | None, on_change: Callable[[TaskView], object] | None, monotonic_ms: Monotonic
) -> Generator[Step, Any, TaskView]:
    """Until the task has ended. Raises TimeoutError, with what it is doing, when `timeout_s` have passed."""
    until_ms = None if timeout_s is None else monotonic_ms() + round(timeout_s * 1000)
    task = yield from ask(calls.task(task_id))
    shown: TaskView | None = None
    while True:
        if on_change is not None and (shown is None or task.revision != shown.revision or task.status != shown.status):
            on_change(task)
            shown = task
        if task.ended:
            return task
        left_s = POLL_S if until_ms is None else (until_ms - monotonic_ms()) / 1000
        if left_s <= 0:
            raise TimeoutError(f"task {task.id} ({task.name}) has not ended within {timeout_s:g} s: {_doing(task)}")
        task = yield from ask(calls.task(task_id, task.revision, min(POLL_S, left_s)))


def wait_array(array_id: str, timeout_s: float | None, monotonic_ms: Monotonic) -> Generator[Step, Any, ArrayView]:
    """Until every task of it has ended. Raises TimeoutError, with how many stand where, when `timeout_s` have passed."""
    until_ms = None if timeout_s is None else monotonic_ms() + round(timeout_s * 1000)
    array = yield from ask(calls.array(array_id))
    while not array.ended:
        left_s = POLL_S if until_ms is None else (until_ms - monotonic_ms()) / 1000
        if left_s <= 0:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(array.counts.items()))
            raise TimeoutError(f"array {array.id} ({array.name}) has not ended within {timeout_s:g} s: {counts}")
        array = yield from ask(calls.array(array_id, array.revision, min(POLL_S, left_s)))
    return array


def _doing(task: TaskView) -> str:
    reason = f"; {task.reason.message}" if task.reason is not None else ""
    where = f" on {task.node}" if task.node and task.status != "queued" else ""
    return f"it is {task.status}{where}{reason}"


# Output


def follow_logs(task_id: str, member: int = 0) -> Generator[Step, Any, None]:
    """Emits (stream, bytes) as one member writes them, through every attempt, until the task has ended and all is read."""
    task = yield from ask(calls.task(task_id))
    read_of: str | None = None
    while True:
        newest = task.allocation_of(member)
        if newest is not None and newest != read_of and (task.ended or task.started_at_ms is not None):
            read_of = newest
            yield from _follow_attempt(task_id, read_of)
            task = yield from ask(calls.task(task_id))
        elif task.ended:
            return
        else:
            task = yield from ask(calls.task(task_id, task.revision, POLL_S))


def _follow_attempt(task_id: str, allocation: str) -> Generator[Step, Any, None]:
    offsets = dict.fromkeys(STREAMS, 0)
    open_streams, latest = list(STREAMS), STREAMS[0]
    while open_streams:
        moved = False
        for stream in tuple(open_streams):
            try:
                chunk = yield from ask(calls.logs(task_id, stream, offsets[stream], allocation=allocation, patience_s=0.0))
            except NotFound:
                open_streams.remove(stream)
                continue
            except Unavailable:
                if (yield from _moved_on(task_id, allocation)):
                    return
                continue
            if chunk.data:
                yield Emit((stream, chunk.data))
                moved, latest = True, stream
            offsets[stream] = chunk.next_offset
            if chunk.complete:
                open_streams.remove(stream)
        if open_streams and not moved:
            yield from _wait_for_more(task_id, latest if latest in open_streams else open_streams[0], offsets, allocation)


def _wait_for_more(task_id: str, stream: Stream, offsets: dict[Stream, int], allocation: str) -> Generator[Step, Any, None]:
    """Hold on at the stream that spoke last; the other is looked at twice a second."""
    try:
        chunk: LogChunk = yield from ask(
            calls.logs(task_id, stream, offsets[stream], wait_s=0.5, allocation=allocation, patience_s=0.0)
        )
    except (NotFound, Unavailable):
        yield Pause(0.5)
        return
    if chunk.data:
        yield Emit((stream, chunk.data))
        offsets[stream] = chunk.next_offset


def _moved_on(task_id: str, allocation: str) -> Generator[Step, Any, bool]:
    """The node cannot be asked: has the scheduler gone on without it? When the task has ended, the error is told."""
    yield Pause(1.0)
    task = yield from ask(calls.task(task_id))
    current = allocation in task.allocations
    if task.ended and current:
        yield from ask(calls.logs(task_id, limit=1, allocation=allocation, patience_s=0.0))
    return not current or task.status == "queued"


# Services


def wait_service(name: str, timeout_s: float, monotonic_ms: Monotonic) -> Generator[Step, Any, ServiceView]:
    """Until every replica of the newest version is ready. Raises TimeoutError with what holds the replicas up."""
    until_ms = monotonic_ms() + round(timeout_s * 1000)
    pause_s = 0.05
    while True:
        service = yield from ask(calls.service(name))
        if service.removed:
            raise Conflict(f"service {name} is being removed", service=name)
        if service.status == "ready" and service.ready >= service.replicas:
            return service
        left_s = (until_ms - monotonic_ms()) / 1000
        if left_s <= 0:
            ended = yield from ask(calls.tasks(TaskQuery(("failed", "refused"), service=name), 3, None))
            raise TimeoutError(_not_ready(service, ended.tasks, timeout_s))
        yield Pause(min(pause_s, left_s))
        pause_s = min(1.0, pause_s * 1.5)


def _not_ready(service: ServiceView, ended: list[TaskView], timeout_s: float) -> str:
    lines = [f"service {service.name} has {service.ready} of {service.replicas} replicas ready after {timeout_s:g} s"]
    for replica in service.replica_list:
        if not replica.ready:
            why = f": {replica.reason.message}" if replica.reason else ""
            lines.append(f"{replica.task} is {replica.status}{f' on {replica.node}' if replica.node else ''}{why}")
    lines += [f"{task.id} ended as {task.status}: {task.reason.message}" for task in ended if task.reason]
    return "; ".join(lines)
