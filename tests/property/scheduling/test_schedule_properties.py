"""What holds for every plan, whatever the cluster and the queue."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest
from builders import a_node, a_snapshot, a_task, commit, end
from hypothesis import given, settings
from hypothesis import strategies as st

from crater_core.lifecycle.invariants import violations
from crater_core.model.node import Node, SharingMode
from crater_core.model.plan import Admitted, Plan
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import NOTHING, Amounts, GpuRequest, Request, TypicalRequest
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import After, Apart, Array, Task, TaskStatus
from crater_core.scheduling import STRATEGIES, admit, explain, quota_use, schedule
from crater_core.scheduling.prices import price_table

SHARING = st.sampled_from([SharingMode.EXCLUSIVE, SharingMode.MPS, SharingMode.TIME_SLICE, SharingMode.MIG])


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Node:
    gpus = draw(st.integers(0, 4))
    return a_node(
        name,
        cpu=draw(st.integers(1, 8)),
        memory_gib=draw(st.integers(1, 8)),
        disk_gib=draw(st.integers(0, 4)),
        gpus=gpus,
        sharing=draw(SHARING),
        gpu_type=draw(st.sampled_from(["a100", "t4"])),
        gpu_memory_mib=draw(st.sampled_from([1000, 3001, 16_000])),
        overcommit_milli=draw(st.sampled_from([1000, 1200])),
        unwell=draw(st.sets(st.integers(0, 3), max_size=1)),
        cordoned=draw(st.booleans()) and draw(st.booleans()),
        port_count=draw(st.integers(0, 3)),
        runtimes=draw(st.sampled_from([("process",), ("process", "docker")])),
    )


@st.composite
def tasks(draw: st.DrawFn, id: str) -> Task:
    kind = draw(st.sampled_from(["cpu", "whole", "share", "memory_share", "control"]))
    spec: dict[str, Any] = {
        "cpu": draw(st.integers(0, 4000)),
        "memory_gib": draw(st.integers(0, 3)),
        "disk_gib": draw(st.integers(0, 1)),
        "ports": draw(st.integers(0, 1)),
        "priority": draw(st.sampled_from([10, 50, 90])),
        "project": draw(st.sampled_from(["ml", "web", "free"])),
        "user": draw(st.sampled_from(["ann", "bob"])),
        "quota_policy": draw(st.sampled_from([None, None, "named"])),
        "at_ms": draw(st.integers(0, 5)),
        "not_before_ms": draw(st.sampled_from([0, 0, 0, 100])),
        "service": draw(st.sampled_from([None, None, "svc"])),
        "image": draw(st.sampled_from([None, None, "busybox"])),
        "strategy": draw(st.sampled_from([None, *STRATEGIES])),
        "time_limit_ms": draw(st.sampled_from([None, 50, 500])),
    }
    match kind:
        case "whole":
            spec |= {"gpu": 1000 * draw(st.integers(1, 3)), "gpu_types": draw(st.sampled_from([(), ("a100",), ("t4", "a100")]))}
        case "share":
            spec |= {"gpu": draw(st.integers(1, 999)), "gpu_count": draw(st.integers(1, 2))}
        case "memory_share":
            spec |= {"gpu_memory_mib": draw(st.integers(1, 4000)), "gpu": draw(st.sampled_from([0, 100]))}
        case "control":
            spec |= {"type": "control"}
        case _:
            pass
    if kind != "control" and spec["service"] is None:
        spec["members"] = draw(st.sampled_from([1, 1, 2, 3]))
        spec["members_min"] = draw(st.sampled_from([None, None, *range(1, spec["members"] + 1)]))
        spec["spread"] = draw(st.sampled_from(Apart))
        spec["anti_affinity"], spec["group"] = draw(st.sampled_from(Apart)), "g"
        spec["array"] = draw(st.sampled_from([None, None, ARRAY, replace(ARRAY, id="y2", running_max=None)]))
        spec["after"] = draw(st.sampled_from([(), (), (), (After("t0"),), (After("t1"), After("y1")), (After("gone"),)]))
    return a_task(id, **spec)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Node], list[Task], list[QuotaPolicy]]:
    limit = st.one_of(st.none(), st.integers(0, 6000))
    policies = [
        QuotaPolicy("named", (), Limits(draw(limit), draw(limit)), Limits(None, draw(limit))),
        QuotaPolicy(
            "ml-quota",
            ("ml",),
            Limits(draw(limit), draw(limit)),
            Limits(draw(limit), None),
            draw(st.sampled_from([Limits(), Limits(gpu_milli=1000), Limits(2000, 3000)])),
            draw(st.booleans()),
        ),
    ]
    return (
        [draw(nodes(f"n{i}")) for i in range(draw(st.integers(0, 4)))],
        [draw(tasks(f"t{i}")) for i in range(draw(st.integers(0, 12)))],
        policies,
    )


WORKLOAD = (
    TypicalRequest(Request(1000, gpu=GpuRequest(1)), 5),
    TypicalRequest(Request(500, gpu=GpuRequest(1, 300, exclusive=False)), 3),
    TypicalRequest(Request(2000, gpu=GpuRequest(2, types=("t4",))), 2),
    TypicalRequest(Request(2000), 2),
)
ARRAY = Array("y1", 3, running_max=1)
EAGER = Settings(hold_after_ms=5, preempt_min_run_ms=0, workload=WORKLOAD)
"""Holds and preemptions happen within the few milliseconds of these stories."""
PRICED = Settings(strategy="fragmentation_aware")
Cluster = tuple[list[Node], list[Task], list[QuotaPolicy]]


def planned(snapshot: Snapshot, now_ms: int = 10) -> Plan:
    return schedule(snapshot, now_ms)


WITH_AND_WITHOUT_PRICES = pytest.mark.parametrize("priced", [False, True], ids=["plain", "priced"])


def a_cluster(nodes: list[Node], tasks: list[Task], policies: list[QuotaPolicy], priced: bool) -> Snapshot:
    """With prices, every task that names no strategy is placed by them."""
    snapshot = a_snapshot(nodes, tasks, policies, settings=PRICED if priced else None)
    snapshot.prices = price_table(nodes, WORKLOAD) if priced else None
    return snapshot


def within(policy: Limits, used: Amounts) -> bool:
    pairs = ((policy.gpu_milli, used.gpu_milli), (policy.cpu_milli, used.cpu_milli))
    return all(limit is None or have <= limit for limit, have in pairs)


@WITH_AND_WITHOUT_PRICES
@given(cluster=clusters())
def test_no_node_device_port_or_slot_is_given_twice(cluster: Cluster, priced: bool) -> None:
    snapshot = a_cluster(*cluster, priced)
    commit(snapshot, planned(snapshot))
    assert violations(snapshot) == []


@given(clusters())
def test_no_quota_is_passed(cluster: Cluster) -> None:
    snapshot = a_snapshot(*cluster)
    commit(snapshot, planned(snapshot))
    for name, use in quota_use(snapshot).items():
        policy = snapshot.policies[name]
        assert within(policy.limits, use.used)
        assert all(within(policy.user_limits, used) for used in use.by_user.values())


@given(clusters())
def test_every_queued_task_is_placed_or_has_a_reason(cluster: Cluster) -> None:
    snapshot = a_snapshot(*cluster)
    plan = planned(snapshot)
    placed = Counter(placement.task for placement in plan.placements)
    for task, count in placed.items():
        spec = snapshot.tasks[task].spec
        assert spec.members_fewest <= count <= spec.members, "a gang starts whole"
    assert set(placed) | set(plan.waiting) == set(snapshot.queued)
    assert not set(placed) & set(plan.waiting)


@given(clusters(), st.data())
def test_neither_order_nor_limits_nor_distance_are_broken_over_many_cycles(cluster: Cluster, data: st.DataObject) -> None:
    """`violations` holds the first two: nothing runs before what it comes after, no array runs more than it may."""
    snapshot = a_snapshot(*cluster, settings=EAGER)
    for now_ms in (10, 200, 400):
        commit(snapshot, planned(snapshot, now_ms), now_ms)
        assert violations(snapshot) == []
        for task, allocations in snapshot.by_task.items():
            spec, nodes = snapshot.tasks[task].spec, [allocation.node for allocation in allocations.values()]
            if spec.spread is Apart.REQUIRE:
                assert len(set(nodes)) == len(nodes)
        for task in data.draw(st.sets(st.sampled_from(sorted(snapshot.by_task) or [""]))) - {""}:
            end(snapshot, task)


@given(clusters(), st.data())
def test_news_are_the_reasons_whose_code_the_tasks_do_not_have_yet(cluster: Cluster, data: st.DataObject) -> None:
    snapshot = a_snapshot(*cluster, settings=EAGER)
    for _ in range(2):
        for task in data.draw(st.sets(st.sampled_from(sorted(snapshot.queued) or [""]))) - {""}:
            code = data.draw(st.sampled_from([ReasonCode.NO_ROOM, ReasonCode.QUOTA_USED_UP, ReasonCode.NO_NODE_READY]))
            snapshot.advance([replace(snapshot.tasks[task], reason=Reason.of(code))])
        plan = planned(snapshot)
        before = {task: snapshot.tasks[task].reason for task in plan.waiting}
        codes = {task: reason.code if reason else None for task, reason in before.items()}
        assert plan.news == {task: reason for task, reason in plan.waiting.items() if reason.code is not codes[task]}
        snapshot.advance([replace(snapshot.tasks[task], reason=reason) for task, reason in (plan.news or {}).items()])


@WITH_AND_WITHOUT_PRICES
@given(cluster=clusters(), random=st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_and_tasks_came_changes_nothing(cluster: Cluster, random: Any, priced: bool) -> None:
    nodes, tasks, policies = cluster
    plan = planned(a_cluster(nodes, tasks, policies, priced))
    random.shuffle(nodes)
    random.shuffle(tasks)
    assert planned(a_cluster(nodes, tasks, policies[::-1], priced)) == plan


@WITH_AND_WITHOUT_PRICES
@given(cluster=clusters())
def test_a_plan_checked_again_on_the_same_snapshot_is_the_same(cluster: Cluster, priced: bool) -> None:
    snapshot = a_cluster(*cluster, priced)
    plan = planned(snapshot)
    for task in snapshot.queued:
        explain(snapshot, task, 10)
    assert planned(snapshot) == plan


@given(clusters(), st.data())
def test_remembered_columns_give_the_plans_of_fresh_ones(cluster: Cluster, data: st.DataObject) -> None:
    """A long life with one memory: nodes and tasks come, change and go, and every plan equals one made from nothing."""
    snapshot = a_snapshot(*cluster, settings=EAGER)
    for step in range(data.draw(st.integers(1, 4))):
        now_ms = data.draw(st.integers(0, 200))
        plan = planned(snapshot, now_ms)
        nodes_now, tasks_now = snapshot.nodes.values(), snapshot.tasks.values()
        fresh = a_snapshot(nodes_now, tasks_now, snapshot.policies.values(), settings=EAGER)
        fresh.prices = snapshot.prices
        fresh.advance(snapshot.allocations.values())
        assert planned(fresh, now_ms) == plan
        for task in snapshot.queued:
            assert explain(fresh, task, now_ms) == explain(snapshot, task, now_ms)
        if data.draw(st.booleans()):
            commit(snapshot, plan, now_ms)
        for task in data.draw(st.sets(st.sampled_from(sorted(snapshot.by_task) or [""]))) - {""}:
            end(snapshot, task)
        if data.draw(st.booleans()):
            snapshot.prices = price_table(snapshot.nodes.values(), data.draw(st.sampled_from([WORKLOAD, WORKLOAD[:2]])))
        changed = [data.draw(nodes(f"n{i}")) for i in data.draw(st.sets(st.integers(0, 5), max_size=2))]
        snapshot.advance([*changed, data.draw(tasks(f"later{step}"))])


@WITH_AND_WITHOUT_PRICES
@given(cluster=clusters(), spare=nodes("spare"))
def test_more_room_never_makes_a_task_wait_that_fitted_alone(cluster: Cluster, spare: Node, priced: bool) -> None:
    some, tasks, policies = cluster
    for task in tasks:
        fits = bool(planned(a_cluster(some, [task], policies, priced)).placements)
        wider = [replace(node, allocatable=node.allocatable + Amounts(1000, 2**30, 2**30)) for node in some]
        for more in ([*some, spare], wider):
            assert bool(planned(a_cluster(more, [task], policies, priced)).placements) >= fits


@given(clusters())
def test_what_fits_an_empty_cluster_is_admitted(cluster: Cluster) -> None:
    some, tasks, policies = cluster
    for task in tasks:
        if planned(a_snapshot(some, [task], policies)).placements:
            assert admit(task.spec, a_snapshot(some, (), policies)) == Admitted()


@given(clusters())
def test_use_of_a_policy_is_the_sum_of_what_live_allocations_hold(cluster: Cluster) -> None:
    snapshot = a_snapshot(*cluster)
    commit(snapshot, planned(snapshot))
    planned(snapshot)
    held: dict[str, Amounts] = defaultdict(lambda: NOTHING)
    for allocation in snapshot.allocations.values():
        spec = snapshot.tasks[allocation.task].spec
        if not allocation.control and spec.quota_policy == "named":
            held["named"] += allocation.held
    assert quota_use(snapshot)["named"].used == held["named"]


@settings(max_examples=50)
@given(clusters(), st.integers(1, 5))
def test_a_bounded_cycle_leaves_the_rest_unlooked_at(cluster: Cluster, bound: int) -> None:
    snapshot = a_snapshot(*cluster, settings=Settings(cycle_tasks_max=bound))
    assert len({placement.task for placement in planned(snapshot).placements}) <= bound


@given(clusters(), st.data())
def test_a_preemption_names_live_less_important_tasks_and_no_victim_too_many(cluster: Cluster, data: st.DataObject) -> None:
    snapshot = a_snapshot(*cluster, settings=EAGER)
    commit(snapshot, planned(snapshot), 10)
    urgent = replace(data.draw(tasks("urgent")), queued_at_ms=11)
    urgent = replace(urgent, spec=replace(urgent.spec, priority=100, strategy="preemptive", members=1, quota_policy=None))
    snapshot.advance([urgent])
    plan = planned(snapshot, 200)
    victims = {
        snapshot.allocations[preemption.victim].task for preemption in plan.preemptions if preemption.preemptor == "urgent"
    }
    assert all(snapshot.tasks[victim].spec.priority < 100 for victim in victims)
    for spared in victims:
        without = a_snapshot(snapshot.nodes.values(), snapshot.tasks.values(), settings=Settings(passing="free"))
        without.advance(snapshot.allocations.values())
        for victim in victims - {spared}:
            end(without, victim)
        without.advance([replace(task, status=TaskStatus.CANCELLED) for task in without.queued.values() if task.id != "urgent"])
        assert planned(without, 11).placements == (), "without one of them it would not fit"
