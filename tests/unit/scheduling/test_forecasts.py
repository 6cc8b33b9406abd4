"""Run times that are only foretold let tasks pass; they never put off the first in line for longer than its patience."""

from __future__ import annotations

from typing import Any

from builders import a_node, a_snapshot, a_task, commit, end

from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import schedule
from crater_core.scheduling.endings import Ending, foretold_end

PATIENCE = 5_000


def running(*tasks: Any, cpu: int = 8) -> Snapshot:
    snapshot = a_snapshot([a_node(cpu=cpu)], tasks, settings=Settings(hold_after_ms=PATIENCE))
    commit(snapshot, schedule(snapshot, 0))
    assert not snapshot.queued
    return snapshot


def placed(snapshot: Snapshot, now_ms: int) -> list[str]:
    return [placement.task for placement in schedule(snapshot, now_ms).placements]


def test_a_foretold_end_gives_the_head_a_reservation_that_only_short_ones_may_use() -> None:
    snapshot = running(a_task("first", cpu=6000, foretold_ms=1000))
    snapshot.advance([a_task("head", cpu=8000), a_task("long", at_ms=1, foretold_ms=1001)])
    plan = schedule(snapshot, 0)
    assert plan.placements == ()
    assert plan.waiting["long"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="head")
    snapshot.advance([a_task("short", at_ms=2, foretold_ms=1000)])
    assert placed(snapshot, 0) == ["short"]


def test_a_task_that_outlives_its_forecast_is_expected_to_take_twice_as_long_and_again() -> None:
    snapshot = running(a_task("first", cpu=6000, foretold_ms=1000))
    (allocation,) = snapshot.allocations.values()
    ends = [foretold_end(snapshot, allocation, now_ms) for now_ms in (0, 999, 1000, 1999, 2000)]
    assert ends == [Ending(at_ms, False) for at_ms in (1000, 1000, 2000, 2000, 4000)]


def test_the_reservation_moves_with_the_correction_though_nothing_else_happens() -> None:
    snapshot = running(a_task("first", cpu=6000, foretold_ms=1000))
    snapshot.advance([a_task("head", cpu=8000), a_task("next", at_ms=1, foretold_ms=900)])
    assert placed(snapshot, 200) == []
    assert placed(snapshot, 1000) == ["next"]


def test_a_head_that_has_waited_long_is_passed_by_nobody_whose_end_is_only_foretold() -> None:
    snapshot = running(a_task("first", cpu=6000, foretold_ms=60_000))
    snapshot.advance([a_task("head", cpu=8000), a_task("hopeful", cpu=1000, at_ms=1, foretold_ms=10)])
    assert placed(snapshot, PATIENCE) == []
    end(snapshot, "first")
    assert placed(snapshot, PATIENCE + 1) == ["head"]


def test_a_declared_limit_still_lets_a_short_one_pass_then() -> None:
    snapshot = running(a_task("first", cpu=6000, time_limit_ms=60_000))
    snapshot.advance([a_task("head", cpu=8000), a_task("short", cpu=1000, at_ms=1, time_limit_ms=10)])
    assert placed(snapshot, PATIENCE) == ["short"]
