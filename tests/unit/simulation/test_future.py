"""What would become of a task is tried on a copy: it says where, at whose cost, or when; and it changes nothing."""

from __future__ import annotations

from typing import Any

from builders import a_node, a_snapshot, a_spec, a_task, commit

from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import ReasonCode
from crater_core.model.snapshot import Settings, Snapshot, copy_of
from crater_core.scheduling import schedule
from crater_core.simulation.future import Expected, expected_start, what_if


def running(*tasks: Any, cpu: int = 8, **more: Any) -> Snapshot:
    snapshot = a_snapshot([a_node(cpu=cpu)], tasks, **more)
    commit(snapshot, schedule(snapshot, 0))
    assert not snapshot.queued
    return snapshot


def test_a_list_is_placed_in_order_refused_or_left_waiting_and_nothing_changes() -> None:
    snapshot = running(a_task("first", cpu=6000, time_limit_ms=1000))
    before = copy_of(snapshot)
    fits, waits, never = what_if(snapshot, [a_spec(cpu=2000), a_spec(cpu=1000), a_spec(cpu=9000)], 100)
    assert [placement.node for placement in fits.placements] == ["n1"]
    assert fits.expected == Expected(100, sure=True)
    assert waits.reason is not None
    assert (waits.placements, waits.reason.code, waits.expected) == ((), ReasonCode.NO_ROOM, Expected(1000, sure=True))
    assert never.refusal is not None
    assert (never.refusal.reason.code, never.refusal.field) == (ReasonCode.LARGER_THAN_ANY_NODE, "resources.cpu")
    assert (snapshot.tasks, snapshot.allocations, snapshot.revision) == (before.tasks, before.allocations, before.revision)


def test_whom_it_would_stop_is_told() -> None:
    snapshot = running(a_task("low", cpu=8000, priority=10), settings=Settings(preempt_min_run_ms=0))
    (verdict,) = what_if(snapshot, [a_spec(cpu=1000, priority=90, strategy="preemptive")], 50)
    assert (verdict.victims, verdict.placements) == (("low",), ())
    assert verdict.reason is not None
    assert verdict.reason.code is ReasonCode.WAITING_FOR_PREEMPTION
    assert verdict.expected.at_ms == 50


def test_those_ahead_in_the_queue_start_first() -> None:
    snapshot = running(a_task("now", cpu=8000, time_limit_ms=1000))
    snapshot.advance([a_task("ahead", at_ms=1, cpu=8000, time_limit_ms=500), a_task("mine", at_ms=2, cpu=8000)])
    assert expected_start(snapshot, "ahead", 10) == Expected(1000, sure=True)
    assert expected_start(snapshot, "mine", 10) == Expected(1500, sure=True)


def test_a_start_that_hangs_on_a_forecast_is_told_as_not_sure() -> None:
    snapshot = running(a_task("now", cpu=8000, foretold_ms=1000))
    snapshot.advance([a_task("mine", at_ms=1, cpu=8000)])
    assert expected_start(snapshot, "mine", 10) == Expected(1000, sure=False)


def test_where_nothing_tells_when_room_comes_it_says_why() -> None:
    snapshot = running(a_task("now", cpu=8000))
    snapshot.advance([a_task("mine", at_ms=1, cpu=8000)])
    expected = expected_start(snapshot, "mine", 10)
    assert expected.at_ms is None
    assert expected.why == "1 running task(s) have no time limit, and none of their kind has ended before"


def test_a_quota_that_is_given_back_counts_as_room_does() -> None:
    policy = QuotaPolicy("q", ("default",), Limits(cpu_milli=4000))
    snapshot = running(a_task("now", cpu=4000, time_limit_ms=700), policies=[policy])
    (verdict,) = what_if(snapshot, [a_spec(cpu=1000)], 10)
    assert verdict.reason is not None
    assert (verdict.reason.code, verdict.expected.at_ms) == (ReasonCode.QUOTA_USED_UP, 700)
