"""Gangs start whole or not at all, elastic ones with what fits; and who keeps away from whom."""

from __future__ import annotations

from builders import a_node, a_snapshot, a_spec, a_task, commit, end

from crater_core.model.node import SharingMode
from crater_core.model.plan import Admitted, Refused
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.snapshot import Settings
from crater_core.model.task import Apart
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
    ports = [port for placement in plan.placements for port in placement.ports]
    assert len(set(ports)) == len(ports) == 4


def test_a_gang_starts_when_its_room_is_there() -> None:
    snapshot = a_snapshot([a_node("a", gpus=1), a_node("b", gpus=1)], [a_task("busy", gpu=1000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("gang", members=2, gpu=1000)])
    assert schedule(snapshot, 1).placements == ()
    end(snapshot, "busy")
    assert len(schedule(snapshot, 2).placements) == 2


def test_an_elastic_gang_starts_at_once_with_as_many_as_fit() -> None:
    snapshot = a_snapshot([a_node("a", gpus=2), a_node("b", gpus=1)], [a_task(members=8, members_min=2, gpu=1000)])
    placements = schedule(snapshot, 0).placements
    assert [placement.member for placement in placements] == [0, 1, 2]
    assert sorted(placement.node for placement in placements) == ["a", "a", "b"]


def test_an_elastic_gang_waits_while_fewer_than_its_least_fit() -> None:
    snapshot = a_snapshot([a_node("a", gpus=4)], [a_task("busy", gpu=3000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("gang", members=8, members_min=2, gpu=1000)])
    plan = schedule(snapshot, 1)
    assert plan.waiting["gang"] == Reason.of(ReasonCode.WAITING_FOR_GANG, placed=1, members=2)
    assert explain(snapshot, "gang", 1).reason == plan.waiting["gang"]


def test_an_elastic_gang_takes_what_its_quota_leaves() -> None:
    policy = QuotaPolicy("q", ("default",), Limits(gpu_milli=3000))
    task = a_task(members=8, members_min=2, gpu=1000)
    assert len(schedule(a_snapshot([a_node(gpus=8)], [task], [policy]), 0).placements) == 3
    by_memory = a_task(members=8, members_min=2, gpu_memory_mib=30_720)
    node = a_node(gpus=8, sharing=SharingMode.TIME_SLICE)
    assert len(schedule(a_snapshot([node], [by_memory], [policy]), 0).placements) == 4


def test_an_elastic_gang_is_admitted_by_its_least() -> None:
    snapshot = a_snapshot([a_node("a", gpus=2)])
    assert admit(a_spec(members=9, members_min=2, gpu=1000), snapshot) == Admitted()
    answer = admit(a_spec(members=9, members_min=3, gpu=1000), snapshot)
    assert answer == Refused(Reason.of(ReasonCode.LARGER_THAN_CLUSTER, members=3, largest=2), "members_min")
    wrong = admit(a_spec(members=2, members_min=3), snapshot)
    assert isinstance(wrong, Refused)
    assert wrong.field == "members_min"


def test_members_that_prefer_to_spread_go_to_different_nodes_first() -> None:
    nodes = [a_node("a", gpus=4), a_node("b", gpus=1)]
    plan = schedule(a_snapshot(nodes, [a_task(members=3, gpu=1000, spread=Apart.PREFER)]), 0)
    assert sorted(placement.node for placement in plan.placements) == ["a", "a", "b"]


def test_members_that_must_spread_wait_for_as_many_nodes() -> None:
    snapshot = a_snapshot([a_node("a", gpus=4), a_node("b", gpus=1)], [a_task("busy", gpu=1000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("gang", members=2, gpu=1000, spread=Apart.REQUIRE)])
    assert schedule(snapshot, 1).waiting["gang"] == Reason.of(ReasonCode.WAITING_FOR_GANG, placed=1, members=2)
    end(snapshot, "busy")
    assert {placement.node for placement in schedule(snapshot, 2).placements} == {"a", "b"}
    answer = admit(a_spec(members=3, gpu=1000, spread=Apart.REQUIRE), snapshot)
    assert answer == Refused(Reason.of(ReasonCode.LARGER_THAN_CLUSTER, members=3, largest=2), "members")


def test_tasks_of_one_group_that_must_not_share_a_node_wait_with_that_reason() -> None:
    apart = {"group": "g", "anti_affinity": Apart.REQUIRE}
    snapshot = a_snapshot([a_node("a"), a_node("b")], [a_task(f"t{i}", **apart) for i in range(3)])
    plan = schedule(snapshot, 0)
    assert {placement.node for placement in plan.placements} == {"a", "b"}
    assert plan.waiting["t2"] == Reason.of(ReasonCode.KEPT_APART, nodes=2, whom="another task of group g")
    commit(snapshot, plan)
    explained = explain(snapshot, "t2", 1)
    assert explained.reason == plan.waiting["t2"]
    rejections = [sentence(one.rejection) for one in explained.candidates if one.rejection]
    assert rejections == ["It runs another task of group g already, and they are to be kept apart."] * 2


def test_tasks_of_one_group_that_would_rather_not_share_a_node_share_it_in_the_end() -> None:
    apart = {"group": "g", "anti_affinity": Apart.PREFER}
    plan = schedule(a_snapshot([a_node("a"), a_node("b")], [a_task(f"t{i}", **apart) for i in range(3)]), 0)
    assert sorted(placement.node for placement in plan.placements) in (["a", "a", "b"], ["a", "b", "b"])


def test_nobody_is_stopped_for_a_node_that_the_task_must_not_have() -> None:
    snapshot = a_snapshot([a_node("a", gpus=2)], settings=Settings(preempt_min_run_ms=0))
    snapshot.advance([a_task("mine", gpu=1000, group="g", priority=90), a_task("other", gpu=1000, priority=10)])
    commit(snapshot, schedule(snapshot, 0))
    urgent = a_task("urgent", gpu=1000, group="g", anti_affinity=Apart.REQUIRE, priority=100, strategy="preemptive")
    snapshot.advance([urgent])
    assert schedule(snapshot, 1).preemptions == ()
