"""Gangs start whole or not at all."""

from __future__ import annotations

from builders import a_node, a_snapshot, a_spec, a_task, commit, end

from crater_core.model.plan import Admitted, Refused
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.scheduling import admit, explain, schedule


def test_all_members_start_together() -> None:
    plan = schedule(a_snapshot([a_node("a", gpus=2), a_node("b", gpus=2)], [a_task(members=3, gpu=1000)]), 0)
    assert [(placement.node, placement.member) for placement in plan.placements] == [("a", 0), ("a", 1), ("b", 2)]


def test_a_gang_waits_whole_when_one_member_cannot_start() -> None:
    snapshot = a_snapshot([a_node("a", gpus=2), a_node("b", gpus=1)], [a_task("busy", gpu=1000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("gang", members=3, gpu=1000), a_task("single", gpu=1000, at_ms=1)])
    plan = schedule(snapshot, 1)
    assert plan.waiting["gang"] == Reason.of(ReasonCode.WAITING_FOR_GANG, placed=2, members=3)
    assert [placement.task for placement in plan.placements] == ["single"]
    assert explain(snapshot, "gang", 1).reason == plan.waiting["gang"]


def test_a_gang_that_failed_leaves_no_trace_in_the_plan_of_others() -> None:
    nodes = [a_node("a", gpus=2), a_node("b", gpus=2)]
    alone = schedule(a_snapshot(nodes, [a_task("t1", gpu=2000, at_ms=1)]), 0)
    behind = schedule(a_snapshot(nodes, [a_task("gang", members=9, gpu=1000), a_task("t1", gpu=2000, at_ms=1)]), 0)
    assert behind.placements == alone.placements


def test_a_gang_counts_with_all_members_against_a_quota() -> None:
    policy = QuotaPolicy("q", ("default",), Limits(gpu_milli=2000))
    snapshot = a_snapshot([a_node(gpus=4)], [a_task(members=3, gpu=1000)], [policy])
    assert schedule(snapshot, 0).waiting["t1"].facts["wanted"] == 3000


def test_a_gang_larger_than_the_cluster_is_refused() -> None:
    snapshot = a_snapshot([a_node("a", gpus=3), a_node("b", gpus=2)])
    assert admit(a_spec(members=2, gpu=2000), snapshot) == Admitted()
    answer = admit(a_spec(members=3, gpu=2000), snapshot)
    assert answer == Refused(Reason.of(ReasonCode.LARGER_THAN_CLUSTER, members=3, largest=2), "members")


def test_members_get_ports_of_their_own() -> None:
    plan = schedule(a_snapshot([a_node(port_first=500)], [a_task(members=2, ports=1)]), 0)
    assert [placement.ports for placement in plan.placements] == [(500,), (501,)]


def test_a_gang_starts_when_its_room_is_there() -> None:
    snapshot = a_snapshot([a_node("a", gpus=1), a_node("b", gpus=1)], [a_task("busy", gpu=1000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("gang", members=2, gpu=1000)])
    assert schedule(snapshot, 1).placements == ()
    end(snapshot, "busy")
    assert len(schedule(snapshot, 2).placements) == 2
