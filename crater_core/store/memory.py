"""A store that forgets when its process ends: for tests and simulations, with the same rules as the durable ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from crater_core.errors import StaleRevision, StaleTerm
from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.snapshot import Entity
from crater_core.model.task import Task
from crater_core.model.usage import UsageRecord
from crater_core.store.protocol import Committed, Loaded, StoredEvent, StoredTask, SubmitKey, TaskFilter


class MemoryStore:
    """Implements `Store`."""

    quick_reads = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._revision = self._term = self._sequence = 0
        self._others: dict[tuple[type[Entity], str], Entity] = {}
        self._tasks: dict[str, Task] = {}
        self._task_revisions: dict[str, int] = {}
        self._allocations: dict[str, Allocation] = {}
        self._of_task: dict[str, list[str]] = {}
        self._keys: dict[tuple[str, str], SubmitKey] = {}
        self._events: list[StoredEvent] = []
        self._usage: dict[str, UsageRecord] = {}

    def begin_term(self) -> int:
        with self._lock:
            self._term += 1
            return self._term

    def load(self) -> Loaded:
        with self._lock:
            live = {task.id: task for task in self._tasks.values() if not task.status.ended}
            held = [a for a in self._allocations.values() if not a.status.ended]
            closed = tuple(a for a in self._allocations.values() if a.status.ended and a.task in live)
            entities: tuple[Entity, ...] = (*self._others.values(), *live.values(), *held)
            revisions = {task_id: self._task_revisions[task_id] for task_id in live}
            return Loaded(self._revision, self._term, self._sequence, entities, closed, revisions)

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        with self._lock:
            if term != self._term:
                raise StaleTerm("another scheduler has taken over", term=term, now=self._term)
            if expected_revision != self._revision:
                raise StaleRevision("the store has moved on", expected=expected_revision, now=self._revision)
            self._revision += 1
            for entity in changes.puts:
                self._put(entity)
            for removed in changes.removed:
                self._others.pop(removed, None)
            for key in keys:
                self._keys[(key.user, key.key)] = key
            for event in changes.events:
                self._sequence += 1
                self._events.append(StoredEvent(self._sequence, event))
            self._usage.update({record.allocation: record for record in changes.usage})
            return Committed(self._revision, self._sequence)

    def stage(
        self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()
    ) -> Callable[[], Committed]:
        return lambda: self.commit(changes, expected_revision, term, keys)

    def _put(self, entity: Entity) -> None:
        if isinstance(entity, Task):
            self._tasks[entity.id] = entity
            self._task_revisions[entity.id] = self._revision
        elif isinstance(entity, Allocation):
            if entity.id not in self._allocations:
                self._of_task.setdefault(entity.task, []).append(entity.id)
            self._allocations[entity.id] = entity
        else:
            self._others[(type(entity), entity.name)] = entity

    def find_key(self, user: str, key: str) -> SubmitKey | None:
        with self._lock:
            return self._keys.get((user, key))

    def task(self, task_id: str) -> StoredTask | None:
        with self._lock:
            return self._stored(self._tasks[task_id]) if task_id in self._tasks else None

    def _stored(self, task: Task) -> StoredTask:
        mine = [self._allocations[name] for name in self._of_task.get(task.id, ())]
        return StoredTask(task, tuple(a for a in mine if a.attempt == task.attempt), self._task_revisions[task.id])

    def tasks(self, wanted: TaskFilter, limit: int, before: str | None = None) -> list[StoredTask]:
        with self._lock:
            keyed = {k.task for k in self._keys.values() if k.key == wanted.key} if wanted.key is not None else None
            found: list[StoredTask] = []
            for task_id in sorted(self._tasks, reverse=True):
                if len(found) == limit:
                    break
                if (before is None or task_id < before) and (keyed is None or task_id in keyed):
                    task = self._tasks[task_id]
                    if _matches(task, wanted):
                        found.append(self._stored(task))
            return found

    def tasks_changed(self, after: int, group: str | None, limit: int) -> tuple[list[StoredTask], int]:
        with self._lock:
            changed = sorted(
                (revision, task_id)
                for task_id, revision in self._task_revisions.items()
                if revision > after and (group is None or self._tasks[task_id].spec.group == group)
            )
            whole = self._revision
            if len(changed) > limit:
                whole = changed[limit - 1][0]
                changed = [pair for pair in changed if pair[0] <= whole]
            return [self._stored(self._tasks[task_id]) for _, task_id in changed], whole

    def allocation(self, allocation_id: str) -> Allocation | None:
        with self._lock:
            return self._allocations.get(allocation_id)

    def events(
        self,
        after: int,
        limit: int,
        *,
        subject: str | None = None,
        subject_id: str | None = None,
        group: str | None = None,
    ) -> list[StoredEvent]:
        with self._lock:
            found = (
                stored
                for stored in self._events
                if stored.sequence > after
                and (subject is None or stored.event.subject == subject)
                and (subject_id is None or stored.event.id == subject_id)
                and (group is None or stored.event.group == group)
            )
            return [stored for stored, _ in zip(found, range(limit), strict=False)]

    def usage(self, from_ms: int, to_ms: int) -> list[UsageRecord]:
        with self._lock:
            return [record for record in self._usage.values() if record.to_ms > from_ms and record.from_ms < to_ms]

    def prune(self, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int = 1000, term: int | None = None) -> int:
        with self._lock:
            if term not in (None, self._term):
                raise StaleTerm("another scheduler has taken over", term=term, now=self._term)
            ended = sorted((t.ended_at_ms or 0, t.id) for t in self._tasks.values() if t.status.ended)
            over = max(0, len(ended) - tasks_max)
            gone = {task_id for n, (at_ms, task_id) in enumerate(ended[:step]) if n < over or at_ms < ended_before_ms}
            for task_id in gone:
                del self._tasks[task_id], self._task_revisions[task_id]
                for allocation_id in self._of_task.pop(task_id, ()):
                    del self._allocations[allocation_id]
            self._keys = {name: key for name, key in self._keys.items() if key.task not in gone}
            self._events = [
                stored
                for stored in self._events
                if not (stored.event.subject == "task" and stored.event.id in gone)
                and not (stored.event.subject != "task" and stored.event.at_ms < ended_before_ms)
            ]
            self._usage = {name: record for name, record in self._usage.items() if record.to_ms >= usage_before_ms}
            return len(gone)

    def close(self) -> None:
        pass


def _matches(task: Task, wanted: TaskFilter) -> bool:
    spec = task.spec
    return (
        (not wanted.statuses or task.status.value in wanted.statuses)
        and wanted.project in (None, spec.project)
        and wanted.user in (None, spec.user)
        and wanted.name in (None, spec.name)
        and wanted.group in (None, spec.group)
        and wanted.service in (None, spec.service)
        and all(spec.labels.get(name) == value for name, value in wanted.labels)
    )
