"""What a task still waits for: of the tasks that it comes after, those that live. Nothing else is kept, so nothing can differ."""

from __future__ import annotations

from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import TaskSpec


def open_dependencies(snapshot: Snapshot, spec: TaskSpec) -> list[str]:
    """Ids of tasks and arrays, in the order in which they are named.

    A task that has ended badly has taken its dependents with it in the same commit: what is gone has ended as it had to.
    """
    return [after.task for after in spec.after if after.task in snapshot.tasks or after.task in snapshot.by_array]


def waiting_for(snapshot: Snapshot, spec: TaskSpec) -> Reason | None:
    """Set while something is open."""
    left = open_dependencies(snapshot, spec)
    if not left:
        return None
    task = snapshot.tasks.get(left[0])
    first = f"{task.spec.name} ({left[0]})" if task is not None else f"array {left[0]}"
    return Reason.of(ReasonCode.WAITING_FOR_TASKS, count=len(left), first=first)
