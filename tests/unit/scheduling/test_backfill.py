"""A blocked task has room kept for it; later ones may use it only if they do not delay it. Nobody waits for ever."""

from __future__ import annotations

from typing import Any

from builders import a_node, a_snapshot, a_task, commit, end

from crater_core.model.node import Node
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import schedule


def running(nodes: list[Node], *tasks: Any, settings: Settings | None = None) -> Snapshot:
    snapshot = a_snapshot(nodes, tasks, settings=settings)
    commit(snapshot, schedule(snapshot, 0))
    assert not snapshot.queued
    return snapshot


def placed(snapshot: Snapshot, now_ms: int) -> list[str]:
    return [placement.task for placement in schedule(snapshot, now_ms).placements]


def test_a_short_task_runs_before_the_reservation_and_a_long_one_does_not() -> None:
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000, time_limit_ms=1000))
    snapshot.advance([a_task("head", cpu=8000), a_task("long", at_ms=1, time_limit_ms=1001), a_task("open", at_ms=2)])
    plan = schedule(snapshot, 0)
    assert plan.placements == ()
    assert plan.waiting["long"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="head")
    snapshot.advance([a_task("short", at_ms=3, time_limit_ms=1000)])
    assert placed(snapshot, 0) == ["short"]


def test_room_that_the_head_does_not_need_stays_open() -> None:
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000, time_limit_ms=1000))
    snapshot.advance([a_task("head", cpu=7000), a_task("beside", cpu=1000, at_ms=1), a_task("too-much", cpu=1000, at_ms=2)])
    assert placed(snapshot, 0) == ["beside"]


def test_other_nodes_stay_open() -> None:
    snapshot = running([a_node("a", cpu=8), a_node("b", cpu=4)], a_task("first", cpu=6000, time_limit_ms=1000))
    snapshot.advance([a_task("head", cpu=8000), a_task("open", cpu=4000, at_ms=1)])
    assert placed(snapshot, 0) == ["open"]


def test_the_head_starts_when_its_reservation_said() -> None:
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000, time_limit_ms=1000))
    snapshot.advance([a_task("head", cpu=8000), a_task("short", cpu=2000, at_ms=1, time_limit_ms=1000)])
    commit(snapshot, schedule(snapshot, 0))
    end(snapshot, "first")
    end(snapshot, "short")
    assert placed(snapshot, 1000) == ["head"]


def test_without_any_foretold_end_later_tasks_pass_until_the_head_has_waited_long() -> None:
    settings = Settings(hold_after_ms=5000)
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000), settings=settings)
    snapshot.advance([a_task("head", cpu=8000), a_task("small", cpu=1000, at_ms=1), a_task("later", cpu=1000, at_ms=2)])
    assert placed(snapshot, 4999) == ["small", "later"]
    plan = schedule(snapshot, 5000)
    assert plan.placements == ()
    assert plan.waiting["small"].code is ReasonCode.HELD_FOR_ANOTHER


def test_the_node_that_is_emptied_stays_the_same_until_the_head_starts() -> None:
    """Others keep coming and going elsewhere; once the held node's own tasks have ended, the head starts."""
    settings = Settings(hold_after_ms=0)
    nodes = [a_node("a", cpu=8), a_node("b", cpu=8)]
    snapshot = running(nodes, a_task("on-a", cpu=7000, priority=99), a_task("on-b", cpu=7000), settings=settings)
    snapshot.advance([a_task("head", cpu=8000, at_ms=1)])
    for round in range(20):
        snapshot.advance([a_task(f"small-{round}", cpu=1000, at_ms=2 + round)])
        plan = schedule(snapshot, 10 + round)
        commit(snapshot, plan, 10 + round)
        for placement in plan.placements:
            assert placement.node == "b", "nothing new starts on the node kept for the head"
            end(snapshot, placement.task)
    end(snapshot, "on-a")
    assert schedule(snapshot, 99).placements[0].task == "head"


def test_a_gang_that_has_waited_long_has_its_nodes_emptied() -> None:
    settings = Settings(hold_after_ms=100)
    nodes = [a_node("a", gpus=1), a_node("b", gpus=1), a_node("c", gpus=1)]
    snapshot = running(nodes, *(a_task(f"r{i}", gpu=1000, at_ms=i) for i in range(3)), settings=settings)
    snapshot.advance([a_task("gang", members=2, gpu=1000, at_ms=0)])
    end(snapshot, "r0")
    snapshot.advance([a_task("small", gpu=1000, at_ms=5)])
    assert placed(snapshot, 99) == ["small"]
    assert placed(snapshot, 100) == []
    end(snapshot, "r1")
    assert placed(snapshot, 101) == ["gang", "gang"]


def a_gang_ahead() -> Snapshot:
    """Three GPUs that are free at 1000, 3000 and 5000, one that nobody can tell of, and a gang of two first in line."""
    nodes = [a_node(name, gpus=1) for name in "abcd"]
    ends = (("r0", 5000), ("r1", 1000), ("r2", None), ("r3", 3000))
    snapshot = running(nodes, *(a_task(name, gpu=1000, at_ms=i, time_limit_ms=ms) for i, (name, ms) in enumerate(ends)))
    snapshot.advance([a_task("gang", members=2, gpu=1000, at_ms=5)])
    return snapshot


def test_a_gang_is_given_the_nodes_on_which_it_can_first_start_together() -> None:
    snapshot = a_gang_ahead()
    end(snapshot, "r1")
    snapshot.advance(
        [a_task("long", gpu=1000, at_ms=6, time_limit_ms=2001), a_task("short", gpu=1000, at_ms=7, time_limit_ms=2000)]
    )
    plan = schedule(snapshot, 1000)
    assert [placement.task for placement in plan.placements] == ["short"], "gone when the second GPU is free, at 3000"
    assert plan.waiting["long"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="gang")
    commit(snapshot, plan, 1000)
    end(snapshot, "r0")
    snapshot.advance([a_task("other", gpu=1000, at_ms=8, time_limit_ms=3000)])
    assert placed(snapshot, 1500) == [], "two are free at 3000 as before, and the one that came free belongs to the gang"
    end(snapshot, "short")
    end(snapshot, "r3")
    assert placed(snapshot, 3000)[:2] == ["gang", "gang"]


def test_members_on_one_node_wait_until_it_has_room_for_all_and_what_they_do_not_need_stays_open() -> None:
    runs = [a_task(f"r{i}", gpu=1000, time_limit_ms=ms) for i, ms in enumerate((1000, 2000, 2000))]
    snapshot = running([a_node("a", gpus=5)], *runs, a_task("r4", gpu=1000))
    snapshot.advance([a_task("gang", members=4, gpu=1000, at_ms=5), a_task("long", gpu=1000, at_ms=6, time_limit_ms=9000)])
    plan = schedule(snapshot, 6)
    assert plan.waiting["long"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="gang")
    snapshot.advance([a_task("short", gpu=1000, at_ms=7, time_limit_ms=1900)])
    assert placed(snapshot, 7) == ["short"], "gone when four are free, at 2000"
    end(snapshot, "r4")
    assert placed(snapshot, 8) == ["long", "short"], "four are free at 2000 beside it"


def test_nobody_passes_when_passing_is_off() -> None:
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000), settings=Settings(passing="none"))
    snapshot.advance([a_task("head", cpu=8000), a_task("small", at_ms=1), a_task("other", cpu=1, at_ms=2)])
    plan = schedule(snapshot, 0)
    assert plan.placements == ()
    assert plan.waiting["small"] == Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="head")


def test_everybody_passes_when_passing_is_free() -> None:
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000, time_limit_ms=9), settings=Settings(passing="free"))
    snapshot.advance([a_task("head", cpu=8000), a_task("small", at_ms=1)])
    assert placed(snapshot, 0) == ["small"]


def test_a_task_that_its_quota_stops_keeps_no_room() -> None:
    from crater_core.model.quota import Limits, QuotaPolicy

    snapshot = running([a_node(cpu=8)], a_task("first", project="p", cpu=6000, time_limit_ms=1000))
    snapshot.advance([QuotaPolicy("q", ("p",), Limits(cpu_milli=8000))])
    snapshot.advance([a_task("head", project="p", cpu=8000), a_task("open", at_ms=1)])
    assert placed(snapshot, 0) == ["open"]


def test_control_tasks_start_on_a_node_that_is_kept() -> None:
    snapshot = running([a_node(cpu=8)], a_task("first", cpu=6000, time_limit_ms=1000))
    snapshot.advance([a_task("head", cpu=8000, priority=99), a_task("run", type="control", at_ms=1)])
    assert placed(snapshot, 0) == ["run"]


def test_several_blocked_tasks_have_room_kept_on_nodes_of_their_own() -> None:
    nodes = [a_node("a", cpu=8), a_node("b", cpu=8)]
    snapshot = running(nodes, a_task("r1", cpu=6000, time_limit_ms=1000), a_task("r2", cpu=6000, time_limit_ms=2000))
    snapshot.advance([a_task("h1", cpu=8000, at_ms=0), a_task("h2", cpu=7500, at_ms=1), a_task("open", cpu=2000, at_ms=2)])
    plan = schedule(snapshot, 0)
    assert plan.placements == ()
    assert plan.waiting["open"].code is ReasonCode.HELD_FOR_ANOTHER
