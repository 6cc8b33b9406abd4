"""Tasks that come after others: released when all of those have ended as they had to, cancelled when one has not."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from crater_core.lifecycle.changes import NO_CHANGES, Changes, joined
from crater_core.lifecycle.tasks import finish, story
from crater_core.model.after import open_dependencies
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskStatus, When


def follow(snapshot: Snapshot, changes: Changes, now_ms: int) -> Changes:
    """What the ends in `changes` mean for those who come after. A cancelled dependent takes its own with it in turn."""
    if not snapshot.dependents:
        return NO_CHANGES
    ends = deque(entity for entity in changes.puts if isinstance(entity, Task) and entity.status.ended)
    gone = {task.id for task in ends}
    gone_of_array: Counter[str] = Counter()
    ready: dict[str, Task] = {}
    parts: list[Changes] = []
    while ends:
        ended = ends.popleft()
        if ended.spec.array is not None:
            gone_of_array[ended.spec.array.id] += 1
        for name, dependent in _dependents(snapshot, ended):
            if dependent.id in gone:
                continue
            reason = _missed(ended, name, dependent)
            if reason is None:
                ready[dependent.id] = dependent
                continue
            cancelled = finish(dependent, TaskStatus.CANCELLED, reason, None, now_ms)
            parts.append(cancelled)
            ends.extend(entity for entity in cancelled.puts if isinstance(entity, Task))
            gone.add(dependent.id)

    def closed(name: str) -> bool:
        return name in gone or (name in snapshot.by_array and len(snapshot.by_array[name]) == gone_of_array[name])

    for task in ready.values():
        if task.id not in gone and all(closed(name) for name in open_dependencies(snapshot, task.spec)):
            parts.append(_released(task, now_ms))
    return joined(parts)


def _dependents(snapshot: Snapshot, ended: Task) -> list[tuple[str, Task]]:
    """With the id by which each names the ended task: its own, or that of its array."""
    names = [ended.id] if ended.spec.array is None else [ended.id, ended.spec.array.id]
    return [(name, snapshot.tasks[task]) for name in names for task in sorted(snapshot.dependents.get(name, ()))]


def _missed(ended: Task, name: str, dependent: Task) -> Reason | None:
    """Set when the end is not the one that the dependent waits for. Of an array, every member must end as it has to."""
    well = ended.status is TaskStatus.SUCCEEDED
    for after in dependent.spec.after:
        if after.task == name and not (after.when is When.ENDED or well is (after.when is When.SUCCEEDED)):
            shown = f"{ended.spec.name} ({ended.id})"
            return Reason.of(ReasonCode.DEPENDENCY_FAILED, task=shown, wanted=after.when.value, status=ended.status.value)
    return None


def _released(task: Task, now_ms: int) -> Changes:
    """It takes its place in the queue now: its age counts from here."""
    waited_ms = task.waited_ms + max(0, now_ms - task.queued_at_ms)
    looks = Reason.of(ReasonCode.NOT_YET_LOOKED_AT)
    released = replace(task, queued_at_ms=now_ms, waited_ms=waited_ms, reason=looks)
    return Changes((released,), events=(story(task, "released", now_ms),))
