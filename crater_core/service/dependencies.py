"""What the tasks of one submit come after: names become ids, and what is unknown, circular or failed already is refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from crater_core.errors import ImpossibleRequest, InvalidRequest
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.task import ARRAY_LABEL, ARRAY_PREFIX, After, Task, TaskSpec, TaskStatus, When
from crater_core.service.batch import Batch
from crater_core.service.shown import Shown
from crater_core.store.protocol import Store, TaskFilter


@dataclass(frozen=True, slots=True)
class Known:
    """A task or an array that was submitted before."""

    name: str
    live: bool
    failed: TaskStatus | None = None
    """How it, or a member of the array, has ended otherwise than well."""
    array: bool = False


Find = Callable[[str], Known | None]
_BAD = (TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.REFUSED)


def outside(specs: Sequence[TaskSpec], shown: Shown) -> set[str]:
    """What these come after and the store alone can tell of: arrays, whose members may have ended long ago, and old tasks."""
    own = {spec.name for spec in specs} if len(specs) > 1 else set[str]()
    names = {after.task for spec in specs for after in spec.after} - own
    return {name for name in names if name.startswith(ARRAY_PREFIX) or shown.record(name) is None}


def known_to(store: Store, name: str) -> Known | None:
    """May wait for a network."""
    if not name.startswith(ARRAY_PREFIX):
        stored = store.task(name)
        return None if stored is None else _known(stored.task)
    of_it = TaskFilter(labels=((ARRAY_LABEL, name),))
    some = [*store.tasks(replace(of_it, statuses=tuple(bad.value for bad in _BAD)), 1), *store.tasks(of_it, 1)]
    return Known(some[0].task.spec.name, False, _failed(some[0].task), array=True) if some else None


def finder(batch: Batch, shown: Shown, earlier: Mapping[str, Known]) -> Find:
    """Looks among what lives, what this turn has ended, what ended lately, and what the store has told before the turn."""

    def ended_in_this_turn() -> list[Task]:
        return [entity for entity in batch.puts.values() if isinstance(entity, Task) and entity.status.ended]

    def array(name: str) -> Known | None:
        before = earlier.get(name)
        members = batch.snapshot.by_array.get(name)
        of_it = [task for task in ended_in_this_turn() if task.spec.array is not None and task.spec.array.id == name]
        of_it += [batch.snapshot.tasks[next(iter(members))]] if members else []
        if before is None and not of_it:
            return None
        lately = shown.arrays[name].ended if name in shown.arrays else Counter[str]()
        failed = [before.failed] if before is not None else []
        failed += [_failed(task) for task in of_it] + [status for status in _BAD if lately[status.value]]
        return Known(
            before.name if before is not None else of_it[0].spec.name,
            bool(members),
            next((status for status in failed if status is not None), None),
            array=True,
        )

    def find(name: str) -> Known | None:
        if name.startswith(ARRAY_PREFIX):
            return array(name)
        task = batch.snapshot.tasks.get(name) or next((task for task in ended_in_this_turn() if task.id == name), None)
        record = shown.record(name) if task is None else None
        task = record.task if record is not None else task
        return earlier.get(name) if task is None else _known(task)

    return find


def _known(task: Task) -> Known:
    return Known(task.spec.name, not task.status.ended, _failed(task))


def _failed(task: Task) -> TaskStatus | None:
    return task.status if task.status.ended and task.status is not TaskStatus.SUCCEEDED else None


def resolve(specs: Sequence[TaskSpec], ids: Sequence[str], find: Find) -> list[TaskSpec]:
    """The specs with ids in `after`. Raises InvalidRequest (unknown, ambiguous, circular) or ImpossibleRequest (has failed)
    with the field at fault.
    """
    if not any(spec.after for spec in specs):
        return list(specs)
    named: dict[str, list[int]] = defaultdict(list)
    for index, spec in enumerate(specs):
        named[spec.name].append(index)
    before: list[list[int]] = [[] for _ in specs]
    resolved: list[TaskSpec] = []
    for index, spec in enumerate(specs):
        after: list[After] = []
        for number, one in enumerate(spec.after):
            field = f"tasks.{index}.after.{number}" if len(specs) > 1 else f"after.{number}"
            other = _in_batch(one, named, field) if len(specs) > 1 else None
            if other is None:
                _check(one, find(one.task), field)
                after.append(one)
            else:
                before[index].append(other)
                after.append(replace(one, task=ids[other]))
        resolved.append(replace(spec, after=tuple(after)))
    _refuse_circles(specs, before)
    return resolved


def _in_batch(after: After, named: dict[str, list[int]], field: str) -> int | None:
    found = named.get(after.task, ())
    if len(found) > 1:
        raise InvalidRequest(f"{field}: {len(found)} tasks of this batch are called {after.task}", field=field, name=after.task)
    return found[0] if found else None


def _check(after: After, known: Known | None, field: str) -> None:
    if known is None:
        raise InvalidRequest(f"{field}: no task and no array has the id {after.task}", field=field, task=after.task)
    if known.array and after.when is When.FAILED:
        raise InvalidRequest(f"{field}: all members of an array can be waited for to succeed, or to end", field=field)
    missed = known.failed if after.when is When.SUCCEEDED else None
    if after.when is When.FAILED and not known.live and known.failed is None:
        missed = TaskStatus.SUCCEEDED
    if missed is not None:
        facts = {"task": f"{known.name} ({after.task})", "wanted": after.when.value, "status": missed.value}
        reason = Reason(ReasonCode.DEPENDENCY_FAILED, facts)
        raise ImpossibleRequest(sentence(reason), field=field, reason=reason.code.value, **facts)


def _refuse_circles(specs: Sequence[TaskSpec], before: list[list[int]]) -> None:
    """Takes off what comes after nothing, again and again: what is left stands in a circle, or behind one."""
    behind: list[list[int]] = [[] for _ in specs]
    for index, others in enumerate(before):
        for other in others:
            behind[other].append(index)
    left = [len(others) for others in before]
    free = [index for index, count in enumerate(left) if not count]
    while free:
        for index in behind[free.pop()]:
            left[index] -= 1
            if not left[index]:
                free.append(index)
    stuck = {index for index, count in enumerate(left) if count}
    if not stuck:
        return
    path, seen = [min(stuck)], {min(stuck): 0}
    while (nearer := next(other for other in before[path[-1]] if other in stuck)) not in seen:
        seen[nearer] = len(path)
        path.append(nearer)
    circle = [specs[index].name for index in [*path[seen[nearer] :], nearer]]
    field = f"tasks.{nearer}.after"
    shown = ", which comes after ".join(circle[:10])
    raise InvalidRequest(f"{field}: the tasks wait for each other in a circle: {shown}", field=field, circle=circle)
