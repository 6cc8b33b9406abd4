"""Proof that the simulation can fail: each test takes one safeguard away, and the simulation finds it missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulation.run import simulate

CUTS = ("node_is_cut_off", "node_hears_and_is_not_heard", "agent_dies")


def _found(promise: str, faults: tuple[str, ...], first: int = 1, seeds: int = 40, schedulers: int = 1) -> None:
    """By one of so many seeds; `first` is one that is known to find it, and only saves time."""
    told: list[str] = []
    for seed in range(first, first + seeds):
        outcome = simulate(seed, faults, tasks=40, schedulers=schedulers)
        if promise in outcome.failure:
            return
        told.append(outcome.failure)
    raise AssertionError(f"no seed of {seeds} found it; they said: {told}")


def test_it_finds_an_agent_that_does_not_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crater_agent.reconcile.LeaseState.kill_at_ms", 10**9)
    _found("two copies", CUTS, first=17)


def test_it_finds_a_node_that_counts_as_lost_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.service.watch import Watch

    def hasty(self: Any, engine: Any, timeout_ms: int, *more: Any, init: Callable[..., None] = Watch.__init__) -> None:
        init(self, engine, timeout_ms // 2, *more)

    monkeypatch.setattr(Watch, "__init__", hasty)
    _found("two copies", CUTS)


def test_it_finds_silence_taken_for_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.errors import SchedulerUnreachable

    def believing(self: SchedulerUnreachable, message: str, **fields: object) -> None:
        super(SchedulerUnreachable, self).__init__(message, **{**fields, "proof": True})

    monkeypatch.setattr(SchedulerUnreachable, "__init__", believing)
    _found("two copies", CUTS, first=17)


def test_it_finds_a_new_scheduler_that_gives_nodes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.service.heard import Heard

    def impatient(self: Any, clock: Any, init: Callable[..., None] = Heard.__init__) -> None:
        init(self, clock)
        self._started_ms -= 60_000

    monkeypatch.setattr(Heard, "__init__", impatient)
    _found("two copies", ("scheduler_is_away_long", "scheduler_dies"), first=17)


def test_it_finds_a_store_that_lets_a_paused_leader_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.store.memory import MemoryStore

    def lenient(self: Any, changes: Any, revision: int, term: int, keys: Any = (), *, commit: Any = MemoryStore.commit) -> Any:
        return commit(self, changes, revision, self._term, keys)

    monkeypatch.setattr(MemoryStore, "commit", lenient)
    _found("a write of term", ("leader_pauses_at_commit",), first=2, schedulers=2)


def test_it_finds_a_leader_that_lost_the_store_and_still_answers_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.service.engine import Engine

    def sure(self: Any) -> None:
        if not self.leading:
            raise self._not_leader()

    monkeypatch.setattr(Engine, "must_lead", sure)
    _found("two copies", ("leader_without_store_is_all_a_node_hears",), first=4, schedulers=2)


def test_it_finds_answers_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.service.engine import Engine
    from crater_core.store import Committed

    async def hasty(self: Any, call: Callable[..., Any], *args: Any, write: Any = Engine._in_writer) -> Any:
        if args:
            return await write(self, call, *args)
        self.left_to_itself = asyncio.ensure_future(write(self, call))
        return Committed(self._working.revision + 1, self.shown.sequence)

    monkeypatch.setattr(Engine, "_in_writer", hasty)
    _found("acknowledged", ("scheduler_dies_between_steps", "scheduler_dies_at_commit", "disks_are_slow"))


def test_it_finds_submits_that_forget_their_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crater_core.store.memory.MemoryStore.find_key", lambda self, user, key: None)
    _found("and then 201", ("messages_repeat",))


def test_it_finds_a_meter_that_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from crater_core.lifecycle import tasks

    def generous(task: Any, allocation: Any, close: Any = tasks.close_record) -> Any:
        record = close(task, allocation)
        return replace(record, to_ms=record.to_ms + 1)

    monkeypatch.setattr(tasks, "close_record", generous)
    _found("metered", ())


def test_it_finds_work_that_is_adopted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that forgets what an earlier one has started starts it again, where nobody heard that it runs."""
    monkeypatch.setattr("simulation.machine.Runtime.adopt", _nothing_found)
    monkeypatch.setattr("simulation.machine.Runtime.remove_strays", _nothing_found)
    _found("twice", ("agent_dies_between_steps", "messages_are_lost"), first=15)


async def _nothing_found(*_: Any) -> list[Any]:
    return []
