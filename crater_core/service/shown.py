"""The committed state, as readers see it: never ahead of the store."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.reason import Reason
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task
from crater_core.store.protocol import Loaded, StoredEvent, StoredTask

ENDED_KEPT = 5_000
EVENTS_KEPT = 10_000
ARRAYS_KEPT = 5_000


@dataclass(slots=True)
class Record:
    """A task with the allocations of its last attempt, by member."""

    task: Task
    revision: int
    allocations: dict[str, Allocation] = field(default_factory=lambda: {})

    def put(self, allocation: Allocation) -> None:
        newest = max((known.attempt for known in self.allocations.values()), default=0)
        if allocation.attempt > newest:
            self.allocations = {}
        if allocation.attempt >= newest:
            self.allocations[allocation.id] = allocation

    def stored(self) -> StoredTask:
        return StoredTask(self.task, tuple(self.allocations.values()), self.revision)


@dataclass(slots=True)
class ArrayRecord:
    """An array's last change, and how many of its tasks have ended how since this process started."""

    revision: int
    ended: Counter[str] = field(default_factory=lambda: Counter())


class Shown:
    """Live tasks, those that ended lately, leases by node, and the newest lines of history."""

    def __init__(self, loaded: Loaded, settings: Settings) -> None:
        self.snapshot = Snapshot(settings=settings, revision=loaded.revision, term=loaded.term)
        self.snapshot.advance(loaded.entities)
        self.sequence = loaded.sequence
        self.records = {
            task.id: Record(task, loaded.task_revisions.get(task.id, loaded.revision)) for task in self.snapshot.tasks.values()
        }
        for allocation in (*loaded.closed, *self.snapshot.allocations.values()):
            record = self.records.get(allocation.task)
            if record and allocation.attempt == record.task.attempt:
                record.put(allocation)
        self.ended: OrderedDict[str, Record] = OrderedDict()
        self.arrays: OrderedDict[str, ArrayRecord] = OrderedDict()
        self.events: deque[StoredEvent] = deque(maxlen=EVENTS_KEPT)
        self.reasons: Mapping[str, Reason] = {}
        """The newest reasons of waiting tasks: their numbers move with every cycle, and are not written."""
        self._lease_revisions: dict[str, int] = {}
        self._first_revision = loaded.revision

    @property
    def revision(self) -> int:
        return self.snapshot.revision

    def record(self, task_id: str) -> Record | None:
        return self.records.get(task_id) or self.ended.get(task_id)

    def leases_changed_at(self, node: str) -> int:
        return self._lease_revisions.get(node, self._first_revision)

    def advance(self, changes: Changes, revision: int, sequence: int) -> Iterable[Hashable]:
        """Take in a commit; says whom to wake."""
        rung: dict[Hashable, None] = {}  # In the order of the changes.
        for entity in changes.puts:
            if isinstance(entity, Task):
                self._put_task(entity, revision)
                rung |= {("task", entity.id): None, ("group", entity.spec.group): None, "tasks": None}
                if entity.spec.array is not None:
                    self._put_member(entity, entity.spec.array.id, revision)
                    rung[("array", entity.spec.array.id)] = None
        for entity in changes.puts:
            if isinstance(entity, Allocation) and self._put_allocation(entity):
                self._lease_revisions[entity.node] = revision
                rung[("node", entity.node)] = None
        first = sequence - len(changes.events) + 1
        self.events.extend(StoredEvent(first + n, event) for n, event in enumerate(changes.events))
        if changes.events:
            rung["events"] = None
        self.snapshot.advance(changes.puts, changes.removed)
        self.snapshot.revision = revision
        self.sequence = sequence
        return rung

    def _put_task(self, task: Task, revision: int) -> None:
        record = self.records.get(task.id)
        if record is None:
            record = self.records[task.id] = Record(task, revision)
        record.task, record.revision = task, revision
        if task.status.ended:
            self.ended[task.id] = self.records.pop(task.id)
            if len(self.ended) > ENDED_KEPT:
                self.ended.popitem(last=False)

    def _put_member(self, task: Task, array: str, revision: int) -> None:
        record = self.arrays.setdefault(array, ArrayRecord(revision))
        record.revision = revision
        record.ended[task.status.value] += task.status.ended
        self.arrays.move_to_end(array)
        if len(self.arrays) > ARRAYS_KEPT:
            self.arrays.popitem(last=False)

    def _put_allocation(self, allocation: Allocation) -> bool:
        """Whether the node's list of leases changed by it."""
        record = self.record(allocation.task)
        if record is not None:
            record.put(allocation)
        known = self.snapshot.allocations.get(allocation.id)
        if known is None:
            return not allocation.status.ended
        return allocation.status.ended or (
            allocation.status is AllocationStatus.STOPPING and known.status is not allocation.status
        )
