"""A more important task may take room from less important ones, once, and gets what it took."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import a_node, a_snapshot, a_task, commit

from crater_core.lifecycle import apply
from crater_core.lifecycle.inputs import Planned, Report
from crater_core.model.allocation import AllocationStatus
from crater_core.model.plan import Plan
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import explain, schedule

LATER = 100_000
"""When everything that runs has had its minimum run time."""


def running(nodes: list[Any], *tasks: Any, settings: Settings | None = None) -> Snapshot:
    snapshot = a_snapshot(nodes, tasks, settings=settings)
    commit(snapshot, schedule(snapshot, 0))
    assert not snapshot.queued
    return snapshot


def urgent(id: str = "urgent", **more: Any) -> Any:
    return a_task(id, **{"priority": 90, "strategy": "preemptive", "at_ms": 50, **more})


def victims(plan: Plan) -> list[str]:
    return [preemption.victim.removeprefix("a-").split("-1-")[0] for preemption in plan.preemptions]


def make_true(snapshot: Snapshot, plan: Plan, now_ms: int) -> None:
    ids = tuple(f"b-{placement.task}" for placement in plan.placements)
    snapshot.advance(apply(snapshot, Planned(plan, ids), now_ms).puts)


def stopped(snapshot: Snapshot, task: str, now_ms: int) -> None:
    for allocation in list(snapshot.by_task[task].values()):
        report = Report(allocation.node, allocation.id, allocation.token, AllocationStatus.CANCELLED, now_ms)
        changes = apply(snapshot, report, now_ms)
        snapshot.advance(changes.puts, changes.removed)


def test_the_fewest_victims_are_stopped_and_the_preemptor_says_what_it_waits_for() -> None:
    nodes = [a_node("a", gpus=2), a_node("b", gpus=2)]
    snapshot = running(nodes, *(a_task(f"s{i}", gpu=1000, at_ms=i) for i in range(2)), a_task("wide", gpu=2000, at_ms=5))
    snapshot.advance([urgent(gpu=2000)])
    plan = schedule(snapshot, LATER)
    assert victims(plan) == ["wide"]
    assert plan.waiting["urgent"] == Reason.of(ReasonCode.WAITING_FOR_PREEMPTION, victims=1)


def test_of_equal_sets_the_one_that_loses_least_work_is_stopped() -> None:
    snapshot = running([a_node(gpus=2)], a_task("old", gpu=1000), a_task("young", gpu=1000))
    young = snapshot.allocations["a-young-1-0"]
    snapshot.advance([replace(young, started_at_ms=30_000)])
    snapshot.advance([urgent(gpu=1000)])
    assert victims(schedule(snapshot, LATER)) == ["young"]


def test_nothing_is_stopped_when_there_is_room_or_when_stopping_is_not_enough() -> None:
    snapshot = running([a_node("a", gpus=2), a_node("b", gpus=1)], a_task("low", gpu=1000), a_task("high", gpu=1000, priority=90))
    snapshot.advance([urgent(gpu=1000)])
    plan = schedule(snapshot, LATER)
    assert (victims(plan), [p.task for p in plan.placements]) == ([], ["urgent"])
    commit(snapshot, plan)
    snapshot.advance([urgent("more", gpu=2000)])
    plan = schedule(snapshot, LATER)
    assert (plan.preemptions, plan.waiting["more"].code) == ((), ReasonCode.NO_ROOM)


def test_equals_and_control_tasks_and_other_strategies_are_left_alone() -> None:
    snapshot = running([a_node(gpus=1)], a_task("equal", gpu=1000, priority=90))
    snapshot.advance([urgent(gpu=1000), a_task("polite", gpu=1000, priority=99)])
    assert schedule(snapshot, LATER).preemptions == ()


def test_a_task_has_its_minimum_run_time() -> None:
    snapshot = running([a_node(gpus=1)], a_task("low", gpu=1000), settings=Settings(preempt_min_run_ms=60_000))
    snapshot.advance([urgent(gpu=1000)])
    assert schedule(snapshot, 59_999).preemptions == ()
    assert victims(schedule(snapshot, 60_000)) == ["low"]


def test_a_task_is_preempted_only_so_often() -> None:
    snapshot = running([a_node(gpus=1)], a_task("low", gpu=1000))
    snapshot.advance([replace(snapshot.tasks["low"], preemptions=3), urgent(gpu=1000)])
    assert schedule(snapshot, LATER).preemptions == ()


def test_a_task_that_saves_its_work_costs_what_it_ran_since_then_at_most() -> None:
    """The one that has run longest would lose most, were it not for its checkpoints."""
    old = a_task("old", gpu=1000, checkpoint_every_ms=60_000)
    snapshot = running([a_node(gpus=2)], old, a_task("young", gpu=1000))
    began = {"old": 0, "young": 50_000}
    snapshot.advance([replace(a, started_at_ms=began[a.task]) for a in snapshot.allocations.values()])
    snapshot.advance([urgent(gpu=1000)])
    assert victims(schedule(snapshot, 120_000)) == ["old"]


def test_a_task_that_saves_its_work_is_stopped_once_it_is_further_and_then_however_often() -> None:
    snapshot = running([a_node(gpus=1)], a_task("low", gpu=1000, checkpoint_every_ms=600_000))
    snapshot.advance([replace(snapshot.tasks["low"], preemptions=3), urgent(gpu=1000)])
    assert schedule(snapshot, 599_999).preemptions == ()
    assert victims(schedule(snapshot, 600_000)) == ["low"]


def test_a_task_that_saves_when_it_is_stopped_still_has_its_minimum_run_time() -> None:
    snapshot = running([a_node(gpus=1)], a_task("low", gpu=1000, checkpoint_every_ms=0))
    snapshot.advance([urgent(gpu=1000)])
    assert schedule(snapshot, 59_999).preemptions == ()
    assert victims(schedule(snapshot, 60_000)) == ["low"]


def test_a_gang_is_stopped_whole() -> None:
    snapshot = running([a_node("a", gpus=1), a_node("b", gpus=1)], a_task("gang", gpu=1000, members=2))
    snapshot.advance([urgent(gpu=1000)])
    assert victims(schedule(snapshot, LATER)) == ["gang", "gang"]


def test_the_freed_room_is_kept_until_the_preemptor_has_it() -> None:
    snapshot = running([a_node(gpus=2)], a_task("one", gpu=1000), a_task("two", gpu=1000))
    snapshot.advance([urgent(gpu=2000), a_task("thief", gpu=1000, priority=80, at_ms=60)])
    plan = schedule(snapshot, LATER)
    assert victims(plan) == ["one", "two"]
    make_true(snapshot, plan, LATER)
    again = schedule(snapshot, LATER + 1)
    assert again.preemptions == (), "one preemption at a time for one task"
    assert again.waiting["urgent"] == Reason.of(ReasonCode.WAITING_FOR_PREEMPTION, victims=2)
    stopped(snapshot, "one", LATER + 2)
    half = schedule(snapshot, LATER + 2)
    assert half.placements == ()
    assert half.waiting["thief"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="urgent")
    assert half.waiting["one"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="urgent")
    make_true(snapshot, half, LATER + 2)
    stopped(snapshot, "two", LATER + 3)
    assert [placement.task for placement in schedule(snapshot, LATER + 3).placements] == ["urgent"]


def test_everybody_who_waits_has_a_true_reason_at_every_step_of_a_preemption() -> None:
    """From before it is decided until the preemptor runs and its victims wait: reasons of others are never lost on the way."""
    snapshot = running([a_node("a", gpus=2), a_node("b", cpu=2)], a_task("one", gpu=1000), a_task("two", gpu=1000))
    snapshot.advance([QuotaPolicy("ads-quota", ("ads",), Limits(cpu_milli=500))])
    snapshot.advance(
        [
            a_task("poor", project="ads", cpu=1000, at_ms=1),
            a_task("typed", gpu=1000, gpu_types=("h100",), at_ms=2),
            a_task("small", gpu=1000, at_ms=3),
        ]
    )
    own = {"poor": ReasonCode.QUOTA_USED_UP, "typed": ReasonCode.GPU_TYPE_MISSING, "small": ReasonCode.NO_ROOM}

    def look(now_ms: int) -> dict[str, ReasonCode]:
        plan = schedule(snapshot, now_ms)
        make_true(snapshot, plan, now_ms)
        placed = {placement.task for placement in plan.placements}
        assert plan.waiting.keys() == {task for task in snapshot.queued if task not in placed}
        for task in snapshot.queued.values():
            assert explain(snapshot, task.id, now_ms).reason == plan.waiting[task.id]
            assert task.reason is not None
            assert task.reason.code is plan.waiting[task.id].code, "what is stored says the same"
        return {task: reason.code for task, reason in plan.waiting.items()}

    assert look(LATER - 1) == own
    snapshot.advance([urgent(gpu=2000)])
    held = {**own, "small": ReasonCode.HELD_FOR_ANOTHER}
    # The one decision after which the others still say what they waited for when it began.
    assert look(LATER) == {**own, "urgent": ReasonCode.WAITING_FOR_PREEMPTION}
    stopped(snapshot, "one", LATER + 1)
    during = {**held, "urgent": ReasonCode.WAITING_FOR_PREEMPTION, "one": ReasonCode.HELD_FOR_ANOTHER}
    assert look(LATER + 1) == during
    stopped(snapshot, "two", LATER + 2)
    assert look(LATER + 2) == {**own, "one": ReasonCode.NO_ROOM, "two": ReasonCode.NO_ROOM}
    assert {allocation.task for allocation in snapshot.allocations.values()} == {"urgent"}


def test_the_preemptor_goes_first_even_when_others_are_ahead_by_now() -> None:
    snapshot = running([a_node(gpus=1)], a_task("low", gpu=1000))
    snapshot.advance([urgent(gpu=1000)])
    make_true(snapshot, schedule(snapshot, LATER), LATER)
    snapshot.advance([a_task("higher", gpu=1000, priority=100, at_ms=70)])
    stopped(snapshot, "low", LATER + 1)
    assert [placement.task for placement in schedule(snapshot, LATER + 1).placements] == ["urgent"]


def test_a_preemptor_that_finds_room_elsewhere_takes_it_and_lets_the_kept_room_go() -> None:
    snapshot = running([a_node("a", gpus=1), a_node("b", gpus=1)], a_task("low", gpu=1000), a_task("also", gpu=1000, priority=60))
    snapshot.advance([urgent(gpu=1000)])
    make_true(snapshot, schedule(snapshot, LATER), LATER)
    stopped_first = next(a.task for a in snapshot.allocations.values() if a.status is AllocationStatus.STOPPING)
    other = "also" if stopped_first == "low" else "low"
    stopped(snapshot, other, LATER + 1)
    assert "urgent" in [placement.task for placement in schedule(snapshot, LATER + 1).placements]


def test_the_reason_survives_when_nobody_can_be_stopped() -> None:
    snapshot = running([a_node(gpus=1)], a_task("same", gpu=1000, priority=90))
    snapshot.advance([urgent(gpu=1000)])
    assert schedule(snapshot, LATER).waiting["urgent"].code is ReasonCode.NO_ROOM
    assert explain(snapshot, "urgent", LATER).strategy == "preemptive"
