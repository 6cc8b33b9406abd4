"""Arrays as callers see them: submitted in one commit, counted, and cancelled together."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from crater_core.errors import Conflict, NotFound
from crater_core.lifecycle.inputs import CancelAsked, TaskSubmitted
from crater_core.model.task import ARRAY_LABEL, ARRAY_PREFIX, Array, Task, TaskSpec, TaskStatus
from crater_core.service.auth import Identity
from crater_core.service.batch import Batch
from crater_core.service.dependencies import finder, resolve
from crater_core.service.engine import Engine, Prepared
from crater_core.service.submits import check_admission, digest_of
from crater_core.store.protocol import StoredTask, SubmitKey, TaskFilter
from crater_core.wire.arrays import ArrayView
from crater_core.wire.base import ReasonView

_PAGE = 1000


async def submit_array(
    engine: Engine, spec: TaskSpec, indices: Sequence[int], running_max: int | None, key: str | None
) -> tuple[str, bool]:
    """The array's id, and whether it is new. One spec for all: it is checked once, and all members lie in one commit."""
    array = Array(engine.ids.new(ARRAY_PREFIX), len(indices), running_max)
    plain = digest_of(replace(spec, array=replace(array, id="")))
    digest = hashlib.blake2b(plain + ",".join(map(str, indices)).encode(), digest_size=16).digest()
    ids = engine.ids.many("t", len(indices))

    earlier = await engine.recall([(spec.user, key)] if key is not None else [], [spec])

    def prepare(batch: Batch) -> Prepared:
        known = engine.key_lookup(batch, earlier)(spec.user, key) if key is not None else None
        if known is not None:
            if known.digest != digest:
                raise Conflict("the idempotency key was used before, for another body", field="idempotency_key", key=key)
            return Prepared((), value=(known.task, False))
        (resolved,) = resolve([spec], [array.id], finder(batch, engine.shown, earlier.names))
        check_admission(resolved, batch.snapshot, "task.")
        whole = replace(resolved, array=array, labels={**resolved.labels, ARRAY_LABEL: array.id})
        inputs = [TaskSubmitted(task, whole, index) for task, index in zip(ids, indices, strict=True)]
        # The key leads to the first member, as keys are forgotten with the tasks they stand for.
        keys = [] if key is None else [SubmitKey(spec.user, key, ids[0], digest)]
        return Prepared(inputs, keys, (array.id, True))

    found, new = (await engine.do(prepare)).value
    return (found, True) if new else (await _array_of(engine, found), False)


async def _array_of(engine: Engine, task: str) -> str:
    record = engine.shown.record(task)
    stored: StoredTask | None = record.stored() if record is not None else await engine.read(engine.store.task, task)
    if stored is None or stored.task.spec.array is None:
        raise Conflict("the idempotency key was used before, for a task that is no array", field="idempotency_key", task=task)
    return stored.task.spec.array.id


async def show_array(engine: Engine, array: str) -> ArrayView:
    """Raises NotFound."""
    live = _live(engine, array)
    one = live[0] if live else await _newest(engine, array)
    known = one.spec.array
    assert known is not None, "found by its array"
    record = engine.shown.arrays.get(array)
    ended = record.ended if record is not None else Counter[str]()
    if len(live) + ended.total() < known.size:
        # Some ended before this process started: the store knows how.
        ended = await engine.read(_count_ended, engine, array)
        live = _live(engine, array)
        if record is not None:
            record.ended = ended
    waiting = next((task for task in live if task.status is TaskStatus.QUEUED), None)
    reason = None if waiting is None else engine.shown.reasons.get(waiting.id) or waiting.reason
    return ArrayView(
        id=array,
        name=one.spec.name,
        project=one.spec.project,
        user=one.spec.user,
        size=known.size,
        running_max=known.running_max,
        counts=dict(Counter(task.status.value for task in live) + ended),
        reason=ReasonView.of(reason),
        submitted_at_ms=one.submitted_at_ms,
        ended=not live,
        revision=record.revision if record is not None else engine.shown.revision,
    )


async def cancel_array(engine: Engine, array: str, who: Identity, reason: str) -> ArrayView:
    """End every task of it that waits or runs."""
    view = await show_array(engine, array)
    who.must_reach(view.project)

    def prepare(batch: Batch) -> Prepared:
        return Prepared([CancelAsked(task, who.user, reason) for task in sorted(batch.snapshot.by_array.get(array, ()))])

    await engine.do(prepare)
    return await show_array(engine, array)


def _live(engine: Engine, array: str) -> list[Task]:
    snapshot = engine.shown.snapshot
    return [snapshot.tasks[task] for task in sorted(snapshot.by_array.get(array, ()))]


async def _newest(engine: Engine, array: str) -> Task:
    found: list[StoredTask] = await engine.read(engine.store.tasks, _members(array), 1)
    if not found:
        raise NotFound(f"no array has the id {array[:200]}", array=array[:200])
    return found[0].task


def _count_ended(engine: Engine, array: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    before: str | None = None
    while True:
        page = engine.store.tasks(_members(array), _PAGE, before)
        counts.update(stored.task.status.value for stored in page if stored.task.status.ended)
        if len(page) < _PAGE:
            return counts
        before = page[-1].task.id


def _members(array: str) -> TaskFilter:
    return TaskFilter(labels=((ARRAY_LABEL, array),))
