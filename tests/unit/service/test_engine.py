"""The engine in one event loop with a store in memory: what it commits, when it wakes, and what it does when it cannot write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from world import a_node, a_spec

from crater_core.errors import Conflict, ImpossibleRequest, StoreUnavailable
from crater_core.lifecycle.changes import Changes
from crater_core.lifecycle.inputs import NodeRegistered, Report
from crater_core.lifecycle.invariants import violations
from crater_core.model.allocation import AllocationStatus
from crater_core.model.snapshot import Settings
from crater_core.model.task import RetryPolicy, TaskStatus
from crater_core.service.engine import Engine
from crater_core.service.http import Hub
from crater_core.service.routes_cluster import ClusterRoutes
from crater_core.service.submits import Submission
from crater_core.store import Committed, MemoryStore, SubmitKey


class FailingStore(MemoryStore):
    """A store whose writes can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.commits = 0

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        if self.broken:
            raise StoreUnavailable("the disk is full")
        self.commits += 1
        return super().commit(changes, expected_revision, term, keys)


def tell(story: Callable[[Engine, FailingStore], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        store = FailingStore()
        engine = Engine(store, Settings())
        engine.start()
        try:
            await engine.happen(NodeRegistered(a_node("n1", cpu=4)))
            return await story(engine, store)
        finally:
            await engine.stop()
            assert violations(engine.shown.snapshot) == []

    return asyncio.run(run())


def a_submission(engine: Engine, key: str | None = None, **spec: Any) -> Submission:
    return Submission(engine.ids.new("t"), a_spec(**spec), key)


def test_a_submit_and_its_placement_are_one_commit() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        before = store.commits
        (submitted,) = await engine.submit([a_submission(engine)])
        assert store.commits == before + 1
        assert engine.shown.snapshot.tasks[submitted.id].status is TaskStatus.ALLOCATED

    tell(story)


def test_callers_that_come_together_share_a_commit() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        before = store.commits
        await asyncio.gather(*[engine.submit([a_submission(engine, cpu_milli=10)]) for _ in range(30)])
        assert store.commits - before <= 3
        assert len(engine.shown.snapshot.allocations) == 30

    tell(story)


def test_one_callers_mistake_is_that_callers_alone() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        good, bad = await asyncio.gather(
            engine.submit([a_submission(engine)]),
            engine.submit([a_submission(engine, cpu_milli=999_000)]),
            return_exceptions=True,
        )
        assert isinstance(bad, ImpossibleRequest)
        assert engine.shown.snapshot.tasks[good[0].id].status is TaskStatus.ALLOCATED

    tell(story)


def test_two_submits_with_one_key_at_the_same_moment_are_one_task() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        answers = await asyncio.gather(*[engine.submit([a_submission(engine, "k")]) for _ in range(5)])
        assert len({one.id for (one,) in answers}) == 1
        assert [one.new for (one,) in answers].count(True) == 1
        with pytest.raises(Conflict):
            await engine.submit([a_submission(engine, "k", name="other")])

    tell(story)


def test_when_the_store_fails_nothing_moves_and_later_it_works_again() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        revision = engine.shown.revision
        store.broken = True
        results = await asyncio.gather(*[engine.submit([a_submission(engine, "k")]) for _ in range(3)], return_exceptions=True)
        assert all(isinstance(result, StoreUnavailable) for result in results)
        assert (engine.shown.revision, engine.shown.snapshot.tasks, engine.trouble) == (revision, {}, "the disk is full")
        store.broken = False
        (submitted,) = await engine.submit([a_submission(engine, "k")])
        assert submitted.new
        assert engine.trouble is None
        assert len(engine.shown.snapshot.allocations) == 1

    tell(story)


def test_readers_never_see_what_is_not_yet_durable() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        seen: list[int] = []
        write = engine._in_writer

        async def slow(call: Callable[..., Any], *args: Any) -> Any:
            await asyncio.sleep(0.02)
            seen.append(len(engine.shown.snapshot.tasks))
            return await write(call, *args)

        engine._in_writer = slow  # type: ignore[method-assign]
        await engine.submit([a_submission(engine)])
        assert seen == [0]
        assert len(engine.shown.snapshot.tasks) == 1

    tell(story)


def test_another_writer_makes_it_read_everything_again() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        store.commit(Changes((a_node("n2", cpu=4),)), engine.shown.revision, engine.term)
        with pytest.raises(StoreUnavailable):
            await engine.submit([a_submission(engine)])
        await engine.submit([a_submission(engine)])
        assert set(engine.shown.snapshot.nodes) == {"n1", "n2"}

    tell(story)


def test_a_takeover_ends_it() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        store.begin_term()
        with pytest.raises(Exception, match="taken over"):
            await engine.submit([a_submission(engine)])
        assert engine.stale.is_set()

    tell(story)


def test_a_lead_that_ran_out_while_the_store_is_silent_shows_as_a_store_that_cannot_be_used() -> None:
    """Before any call to the store has failed: agents and callers are refused already."""

    async def story(engine: Engine, store: FailingStore) -> None:
        routes = ClusterRoutes(cast("Hub", SimpleNamespace(engine=engine)))

        async def status() -> str:
            return json.loads((await routes.health()).body)["status"]

        engine.leads_until_ms = engine.clock.monotonic_ms() + 60_000
        assert (await status(), engine.why_not_writable()) == ("ok", None)
        engine.leads_until_ms = engine.clock.monotonic_ms() - 1
        with pytest.raises(StoreUnavailable, match="could not renew its lead in time"):
            await engine.submit([a_submission(engine)])
        assert engine.trouble is None
        assert (await status(), (await routes.ready()).status_code) == ("store_unavailable", 503)

    tell(story)


@pytest.mark.parametrize("backoff_ms", [1, 50])
def test_a_task_that_backs_off_starts_again_by_itself(backoff_ms: int) -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        retry = RetryPolicy(attempts_max=2, on_failure=True, backoff_ms=backoff_ms)
        (submitted,) = await engine.submit([a_submission(engine, retry=retry)])
        (first,) = engine.shown.snapshot.allocations.values()
        write = engine._in_writer

        async def slow(call: Callable[..., Any], *args: Any) -> Any:
            await asyncio.sleep(0.01)  # Longer than the shorter backoff: its moment passes before the commit is done.
            return await write(call, *args)

        engine._in_writer = slow  # type: ignore[method-assign]
        await engine.happen(Report("n1", first.id, first.token, AllocationStatus.FAILED, 1, exit_code=1))
        assert engine.shown.snapshot.tasks[submitted.id].status is TaskStatus.QUEUED
        while engine.shown.snapshot.tasks[submitted.id].status is not TaskStatus.ALLOCATED:
            assert await engine.bell.wait(("task", submitted.id), 5)
        assert engine.shown.snapshot.tasks[submitted.id].attempt == 2

    tell(story)


def test_a_fault_in_the_cycle_does_not_keep_callers_from_being_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise ZeroDivisionError

    async def story(engine: Engine, store: FailingStore) -> None:
        monkeypatch.setattr("crater_core.service.engine.schedule", faulty)
        (submitted,) = await engine.submit([a_submission(engine)])
        assert engine.shown.snapshot.tasks[submitted.id].status is TaskStatus.QUEUED

    tell(story)


def test_a_scheduler_that_starts_foretells_run_times_from_the_tasks_that_succeeded_before() -> None:
    async def story(engine: Engine, store: FailingStore) -> None:
        await engine.submit([a_submission(engine)])
        (lease,) = engine.shown.snapshot.allocations.values()
        for status in (AllocationStatus.RUNNING, AllocationStatus.SUCCEEDED):
            await engine.happen(Report("n1", lease.id, lease.token, status, 1))
        (next_one,) = await engine.submit([a_submission(engine)])
        foretold_ms = engine.shown.snapshot.tasks[next_one.id].foretold_ms
        assert foretold_ms is not None
        again = Engine(store, Settings())
        assert again.shown.snapshot.run_times == engine.shown.snapshot.run_times
        assert again.shown.snapshot.run_times.foretell(again.shown.snapshot.tasks[next_one.id].spec) == foretold_ms

    tell(story)


def test_after_a_stop_callers_are_refused() -> None:
    async def run() -> None:
        engine = Engine(MemoryStore(), Settings())
        engine.start()
        await engine.stop()
        with pytest.raises(StoreUnavailable):
            await engine.submit([a_submission(engine)])

    asyncio.run(run())
