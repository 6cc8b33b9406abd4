"""What a submit asks of the store is asked before its turn and off the event loop: a store far away stops nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from crater_core.errors import Conflict, ImpossibleRequest, InvalidRequest
from crater_core.lifecycle.inputs import CancelAsked, NodeRegistered
from crater_core.model.snapshot import Settings
from crater_core.model.task import After, TaskStatus, When
from crater_core.service.arrays import submit_array
from crater_core.service.engine import Engine
from crater_core.service.submits import Submission
from crater_core.store import MemoryStore, StoredTask, SubmitKey, TaskFilter
from tests.world import a_node, a_spec

SEVERAL = range(3)


def must_not_be_in_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise AssertionError("the event loop waits for the store")


class FarStore(MemoryStore):
    """A store that an event loop must not ask."""

    quick_reads = False

    def find_key(self, user: str, key: str) -> SubmitKey | None:
        must_not_be_in_a_loop()
        return super().find_key(user, key)

    def task(self, task_id: str) -> StoredTask | None:
        must_not_be_in_a_loop()
        return super().task(task_id)

    def tasks(self, wanted: TaskFilter, limit: int, before: str | None = None) -> list[StoredTask]:
        must_not_be_in_a_loop()
        return super().tasks(wanted, limit, before)


def tell(story: Callable[[Engine], Awaitable[Any]]) -> Any:
    engine = Engine(FarStore(), Settings())

    async def run() -> Any:
        engine.start()
        try:
            await engine.happen(NodeRegistered(a_node("n1", cpu=4)))
            return await story(engine)
        finally:
            await engine.stop()

    return asyncio.run(run())


async def submit(engine: Engine, key: str | None = None, **spec: Any) -> str:
    (submitted,) = await engine.submit([Submission(engine.ids.new("t"), a_spec(**spec), key)])
    return submitted.id


async def cancel(engine: Engine, *tasks: str) -> None:
    assert await engine.happen(*[CancelAsked(task, "ann", "not needed") for task in tasks]) == [None] * len(tasks)


def forget(engine: Engine) -> None:
    """As if all of it had ended long ago, or before this process started."""
    engine.shown.ended.clear()
    engine.shown.arrays.clear()


async def an_array(engine: Engine, **spec: Any) -> tuple[str, list[str]]:
    # Larger than what is free: its members wait, and a cancel ends them at once.
    await submit(engine, cpu_milli=4000)
    array, _ = await submit_array(engine, a_spec(cpu_milli=4000, **spec), SEVERAL, None, None)
    return array, sorted(engine.shown.snapshot.by_array[array])


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_key_that_is_known_leads_to_the_task_of_before(forgotten: bool) -> None:
    async def story(engine: Engine) -> None:
        first = await submit(engine, key="k")
        if forgotten:
            forget(engine)
        assert await submit(engine, key="k") == first

    tell(story)


def test_an_arrays_key_that_is_known_leads_to_the_array_of_before() -> None:
    async def story(engine: Engine) -> None:
        spec = a_spec()
        first, new = await submit_array(engine, spec, SEVERAL, None, "k")
        assert new
        assert await submit_array(engine, spec, SEVERAL, None, "k") == (first, False)
        with pytest.raises(Conflict, match="another body"):
            await submit_array(engine, replace(spec, command=("false",)), SEVERAL, None, "k")

    tell(story)


def test_a_task_comes_after_one_that_only_the_store_remembers() -> None:
    async def story(engine: Engine) -> None:
        earlier = await submit(engine, cpu_milli=4000)
        waiting = await submit(engine, cpu_milli=4000)
        await cancel(engine, waiting)
        forget(engine)
        with pytest.raises(ImpossibleRequest) as refused:
            await submit(engine, after=(After(waiting),))
        assert refused.value.fields["status"] == "cancelled"
        later = await submit(engine, after=(After(waiting, When.FAILED), After(earlier)))
        assert engine.shown.snapshot.tasks[later].status is TaskStatus.QUEUED

    tell(story)


def test_what_nobody_knows_is_refused() -> None:
    async def story(engine: Engine) -> None:
        for unknown in ("t-unknown", "a-unknown"):
            with pytest.raises(InvalidRequest, match=f"no task and no array has the id {unknown}"):
                await submit(engine, after=(After(unknown),))
            with pytest.raises(InvalidRequest, match=f"no task and no array has the id {unknown}"):
                await submit_array(engine, a_spec(after=(After(unknown),)), SEVERAL, None, None)

    tell(story)


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("ended", [1, 3])
def test_after_an_array_of_which_a_member_was_cancelled_nothing_can_come_that_wants_success(ended: int, forgotten: bool) -> None:
    async def story(engine: Engine) -> None:
        array, members = await an_array(engine)
        await cancel(engine, *members[:ended])
        if forgotten:
            forget(engine)
        with pytest.raises(ImpossibleRequest) as refused:
            await submit(engine, after=(After(array),))
        assert refused.value.fields["status"] == "cancelled"
        assert await submit(engine, after=(After(array, When.ENDED),))

    tell(story)


@pytest.mark.parametrize("of_an_array", [False, True])
def test_what_ends_between_the_question_and_the_turn_is_seen(of_an_array: bool) -> None:
    async def story(engine: Engine) -> None:
        array, members = await an_array(engine)
        other = await submit(engine, cpu_milli=4000)
        ask = engine.read

        async def read(call: Callable[..., Any], *args: Any) -> Any:
            found = await ask(call, *args)
            await cancel(engine, members[0] if of_an_array else other)
            return found

        engine.read = read
        with pytest.raises(ImpossibleRequest) as refused:
            # With the array beside it, so that the store is asked in both cases.
            await submit(engine, after=(After(array, When.SUCCEEDED if of_an_array else When.ENDED), After(other)))
        assert refused.value.fields["field"] == ("after.0" if of_an_array else "after.1")

    tell(story)
