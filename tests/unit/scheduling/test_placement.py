"""Where a task goes: CPU, memory, whole and shared GPUs, pools, labels, ports, control tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import a_node, a_snapshot, a_task, commit, end

from crater_core.model.node import ControlShare, Node, NodeStatus, SharingMode
from crater_core.model.plan import Plan
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task
from crater_core.model.units import GIB
from crater_core.scheduling import explain, schedule

LOAD_BALANCE = Settings(strategy="load_balance")


def places(plan: Plan) -> dict[str, str]:
    return {placement.task: placement.node for placement in plan.placements}


def devices(plan: Plan, task: str) -> list[tuple[str, int, int]]:
    placement = next(p for p in plan.placements if p.task == task)
    return [(grant.uuid, grant.compute_milli, grant.memory_mib) for grant in placement.grants]


def code(snapshot: Snapshot, task: str = "t1") -> ReasonCode:
    return schedule(snapshot, 0).waiting[task].code


def test_best_fit_takes_the_smallest_node_that_is_enough() -> None:
    snapshot = a_snapshot([a_node("large", cpu=64), a_node("small", cpu=4)], [a_task("t1", cpu=4000)])
    assert places(schedule(snapshot, 0)) == {"t1": "small"}


def test_load_balance_takes_the_least_loaded_node() -> None:
    snapshot = a_snapshot([a_node("a"), a_node("b")], [a_task("t1"), a_task("t2", at_ms=1)], settings=LOAD_BALANCE)
    assert places(schedule(snapshot, 0)) == {"t1": "a", "t2": "b"}


def test_the_task_overrides_the_pool_and_the_pool_overrides_the_scheduler() -> None:
    nodes = [a_node("large", cpu=64), a_node("small", cpu=4)]
    by_pool = Settings(pool_strategies={"cpu-pool": "load_balance"})
    assert places(schedule(a_snapshot(nodes, [a_task("t1")], settings=by_pool), 0)) == {"t1": "small"}
    assert places(schedule(a_snapshot(nodes, [a_task("t1", pools=("cpu-pool",))], settings=by_pool), 0)) == {"t1": "large"}
    own = a_task("t1", pools=("cpu-pool",), strategy="best_fit")
    assert places(schedule(a_snapshot(nodes, [own], settings=by_pool), 0)) == {"t1": "small"}


@pytest.mark.parametrize("strategy", ["best_fit", "load_balance"])
def test_a_cpu_task_leaves_gpu_nodes_alone_when_another_will_do(strategy: str) -> None:
    snapshot = a_snapshot([a_node("a", gpus=1), a_node("b")], [a_task("t1")], settings=Settings(strategy=strategy))
    assert places(schedule(snapshot, 0)) == {"t1": "b"}


def test_a_cpu_task_may_use_the_cores_of_a_gpu_node_but_none_of_its_devices() -> None:
    plan = schedule(a_snapshot([a_node("a", gpus=1)], [a_task("t1")]), 0)
    assert plan.placements[0].grants == ()


def test_a_whole_gpu_comes_with_all_its_memory() -> None:
    plan = schedule(a_snapshot([a_node(gpus=2)], [a_task(gpu=2000)]), 0)
    assert devices(plan, "t1") == [("GPU-n1-0", 1000, 40_960), ("GPU-n1-1", 1000, 40_960)]


def test_a_whole_gpu_spares_shareable_devices_where_it_can() -> None:
    shared, whole = a_node("n", gpus=1, sharing=SharingMode.MPS).devices[0], a_node("m", gpus=1).devices[0]
    node = replace(a_node("n1", gpus=1), devices=(shared, replace(whole, index=1)))
    assert devices(schedule(a_snapshot([node], [a_task(gpu=1000)]), 0), "t1") == [("GPU-m-0", 1000, 40_960)]


def test_a_device_that_is_shared_is_not_whole() -> None:
    snapshot = a_snapshot([a_node(gpus=1, sharing=SharingMode.MPS)], [a_task("share", gpu=100)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("t1", gpu=1000)])
    reason = schedule(snapshot, 0).waiting["t1"]
    assert (reason.code, reason.facts["free"]) == (ReasonCode.NO_ROOM, 900)


def test_an_exclusive_device_gives_no_share() -> None:
    assert code(a_snapshot([a_node(gpus=1)], [a_task(gpu=500)])) is ReasonCode.GPU_TYPE_MISSING


def test_a_share_takes_the_fullest_device_that_has_room() -> None:
    node = a_node(gpus=2, sharing=SharingMode.TIME_SLICE)
    tasks = [a_task("t1", gpu=600, at_ms=1), a_task("t2", gpu=700, at_ms=2), a_task("t3", gpu=300, at_ms=3)]
    plan = schedule(a_snapshot([node], tasks), 0)
    assert [devices(plan, task)[0][0] for task in ("t1", "t2", "t3")] == ["GPU-n1-0", "GPU-n1-1", "GPU-n1-1"]


def test_a_share_by_memory_takes_the_same_fraction_of_compute_rounded_up() -> None:
    node = a_node(gpus=1, sharing=SharingMode.MPS, gpu_memory_mib=3000)
    assert devices(schedule(a_snapshot([node], [a_task(gpu_memory_mib=1000)]), 0), "t1") == [("GPU-n1-0", 334, 1000)]


def test_a_share_by_compute_takes_the_same_fraction_of_memory_rounded_down() -> None:
    node = a_node(gpus=1, sharing=SharingMode.MPS, gpu_memory_mib=1001)
    assert devices(schedule(a_snapshot([node], [a_task(gpu=500)]), 0), "t1") == [("GPU-n1-0", 500, 500)]


def test_overcommit_widens_memory_and_never_compute() -> None:
    node = a_node(gpus=1, sharing=SharingMode.MPS, gpu_memory_mib=10_000, overcommit_milli=1200)
    tasks = [a_task(f"t{i}", gpu=300, gpu_memory_mib=4000, at_ms=i) for i in range(4)]
    plan = schedule(a_snapshot([node], tasks), 0)
    assert set(places(plan)) == {"t0", "t1", "t2"}
    assert plan.waiting["t3"].facts["resource"] == "gpu"
    by_compute = schedule(a_snapshot([node], [a_task(f"t{i}", gpu=500, gpu_memory_mib=10, at_ms=i) for i in range(3)]), 0)
    assert set(by_compute.waiting) == {"t2"}


def test_shares_of_several_devices_are_on_different_ones() -> None:
    node = a_node(gpus=3, sharing=SharingMode.TIME_SLICE)
    plan = schedule(a_snapshot([node], [a_task(gpu=200, gpu_count=2)]), 0)
    assert [uuid for uuid, _, _ in devices(plan, "t1")] == ["GPU-n1-0", "GPU-n1-1"]


def test_an_mps_device_serves_one_user_at_a_time() -> None:
    snapshot = a_snapshot(
        [a_node(gpus=1, sharing=SharingMode.MPS)],
        [
            a_task("t1", gpu=250, user="ann"),
            a_task("t2", gpu=250, user="bob", at_ms=1),
            a_task("t3", gpu=250, user="ann", at_ms=2),
        ],
    )
    plan = schedule(snapshot, 0)
    assert set(places(plan)) == {"t1", "t3"}
    assert plan.waiting["t2"].code is ReasonCode.MPS_USER
    commit(snapshot, plan)
    assert code(snapshot, "t2") is ReasonCode.MPS_USER
    end(snapshot, "t1")
    end(snapshot, "t3")
    assert places(schedule(snapshot, 0)) == {"t2": "n1"}


def test_a_time_sliced_device_serves_several_users() -> None:
    node = a_node(gpus=1, sharing=SharingMode.TIME_SLICE)
    plan = schedule(a_snapshot([node], [a_task("t1", gpu=250, user="ann"), a_task("t2", gpu=250, user="bob")]), 0)
    assert set(places(plan)) == {"t1", "t2"}


def test_shares_of_several_devices_are_never_of_mps_devices() -> None:
    """The agent could not start them: a program has one MPS daemon, and each daemon one device."""
    nodes = [a_node("mps", gpus=2, sharing=SharingMode.MPS), a_node("sliced", gpus=2, sharing=SharingMode.TIME_SLICE)]
    tasks = [a_task(f"t{i}", gpu=600, gpu_count=2, at_ms=i) for i in range(2)]
    snapshot = a_snapshot(nodes, tasks)
    plan = schedule(snapshot, 0)
    assert places(plan) == {"t0": "sliced"}
    assert plan.waiting["t1"].facts == {"resource": "gpu", "wanted": 1200, "free": 800}
    commit(snapshot, plan)
    assert {one.node: one.rejection.code for one in explain(snapshot, "t1", 0).candidates if one.rejection} == {
        "mps": ReasonCode.MPS_ONE_GPU,
        "sliced": ReasonCode.GPU_SHORT,
    }
    snapshot.advance([replace(nodes[1], status=NodeStatus.LOST)])
    assert schedule(snapshot, 0).waiting["t1"] == Reason.of(ReasonCode.MPS_ONE_GPU, count=2, devices=2)


def test_an_unwell_device_is_not_given_out() -> None:
    plan = schedule(a_snapshot([a_node(gpus=2, unwell=[0])], [a_task(gpu=1000)]), 0)
    assert devices(plan, "t1")[0][0] == "GPU-n1-1"


@pytest.mark.parametrize("wanted", ["H100", "h100", "nvidia h100 80gb"])
def test_a_gpu_type_is_compared_with_type_and_model_in_lower_case(wanted: str) -> None:
    nodes = [a_node("a", gpus=1), a_node("b", gpus=1, gpu_type="nvidia-h100", model="NVIDIA H100 80GB")]
    assert places(schedule(a_snapshot(nodes, [a_task(gpu=1000, gpu_types=("v100", wanted))]), 0)) == {"t1": "b"}


def test_any_of_several_types_will_do_and_room_decides_among_them() -> None:
    """As "a100 or h100" says."""
    nodes = [a_node("a", gpus=1), a_node("b", gpus=1, gpu_type="nvidia-h100"), a_node("c", gpus=1, gpu_type="t4", model="T4")]
    tasks = [a_task(f"t{i}", gpu=1000, gpu_types=("a100", "h100"), at_ms=i) for i in range(3)]
    plan = schedule(a_snapshot(nodes, tasks), 0)
    assert places(plan) == {"t0": "a", "t1": "b"}
    assert plan.waiting["t2"].facts == {"resource": "gpu", "wanted": 1000, "free": 0}, "the free T4 is neither"


def a_slice_task(id: str = "t1", profile: str = "2g.20gb", count: int = 1, **more: Any) -> Task:
    task = a_task(id, **more)
    return replace(task, spec=replace(task.spec, request=replace(task.spec.request, gpu=GpuRequest(count, mig_profile=profile))))


def mig_nodes() -> list[Node]:
    """Slices of two profiles, and whole cards."""
    small = a_node("small", gpus=2, model="NVIDIA A100-SXM4-40GB MIG 1g.5gb", sharing=SharingMode.MIG, gpu_memory_mib=4_864)
    large = a_node("large", gpus=2, model="NVIDIA A100-SXM4-80GB MIG 2g.20gb", sharing=SharingMode.MIG, gpu_memory_mib=20_096)
    return [a_node("card", gpus=2), large, small]


def test_a_slice_is_chosen_by_its_profile_and_given_whole() -> None:
    plan = schedule(a_snapshot(mig_nodes(), [a_slice_task(), a_slice_task("t2", "1g.5gb", 2)]), 0)
    assert places(plan) == {"t1": "large", "t2": "small"}
    grants = {placement.task: placement.grants for placement in plan.placements}
    assert [(grant.sharing, grant.compute_milli, grant.memory_mib) for grant in grants["t1"]] == [(SharingMode.MIG, 1000, 20_096)]
    assert len({grant.uuid for grant in grants["t2"]}) == 2


def test_any_profile_will_do_but_a_card_is_no_slice_and_a_slice_no_card() -> None:
    nodes = mig_nodes()
    assert places(schedule(a_snapshot(nodes, [a_slice_task(profile="any")]), 0))["t1"] in ("large", "small")
    assert places(schedule(a_snapshot(nodes, [a_task(gpu=2000)]), 0)) == {"t1": "card"}
    assert schedule(a_snapshot(nodes[:1], [a_slice_task(profile="any")]), 0).placements == ()
    assert schedule(a_snapshot(nodes[1:], [a_task(gpu=1000)]), 0).placements == ()
    assert schedule(a_snapshot(nodes[1:], [a_task(gpu=500)]), 0).placements == (), "nor is a slice shared"


def test_one_request_may_take_a_card_of_some_types_or_a_slice_of_some_profile() -> None:
    """As "a100 or 2g.20gb" says. A type names cards; a slice is named by its profile, or by its model."""
    nodes = [*mig_nodes(), a_node("t4", gpus=1, gpu_type="t4", model="T4")]
    tasks = [a_task(f"t{i}", gpu=1000, gpu_types=("a100", "2g.20gb"), at_ms=i) for i in range(5)]
    plan = schedule(a_snapshot(nodes, tasks), 0)
    assert sorted(places(plan).values()) == ["card", "card", "large", "large"]
    assert plan.waiting["t4"].facts == {"resource": "gpu", "wanted": 1000, "free": 0}, "neither the T4 nor the smaller slices"
    sharing = {placement.node: placement.grants[0].sharing for placement in plan.placements}
    assert sharing == {"card": SharingMode.EXCLUSIVE, "large": SharingMode.MIG}
    by_model = [a_task(gpu=1000, gpu_types=("t4", "nvidia a100-sxm4-40gb mig 1g.5gb"))]
    assert places(schedule(a_snapshot(nodes[:3], by_model), 0)) == {"t1": "small"}


def test_of_a_card_and_slices_that_would_all_do_the_smallest_is_taken() -> None:
    one = a_node("n1", gpus=1)
    large, small = (node.devices[0] for node in mig_nodes()[1:])
    node = replace(one, devices=(*one.devices, replace(large, index=1), replace(small, index=2)))
    tasks = [a_task(f"t{i}", gpu=1000, gpu_types=("a100", "1g.5gb", "2g.20gb"), at_ms=i) for i in range(3)]
    plan = schedule(a_snapshot([node], tasks), 0)
    assert [devices(plan, f"t{i}")[0][2] for i in range(3)] == [4_864, 20_096, 40_960]


def test_slices_that_are_taken_are_not_given_again() -> None:
    tasks = [a_slice_task(f"t{i}", at_ms=i) for i in range(3)]
    plan = schedule(a_snapshot(mig_nodes(), tasks), 0)
    assert places(plan) == {"t0": "large", "t1": "large"}
    assert plan.waiting["t2"].code is ReasonCode.NO_ROOM


def test_a_missing_type_is_said_with_those_that_are_there() -> None:
    reason = schedule(a_snapshot([a_node(gpus=1)], [a_task(gpu=1000, gpu_types=("h100",))]), 0).waiting["t1"]
    assert (reason.code, reason.facts["present"]) == (ReasonCode.GPU_TYPE_MISSING, "a100")
    snapshot = a_snapshot(mig_nodes()[1:], [a_task(gpu=1000, gpu_types=("a100",)), a_slice_task("t2", "3g.40gb")])
    waiting = schedule(snapshot, 0).waiting
    assert sentence(waiting["t1"]) == "No ready node has such a GPU: wanted a100; present a100 1g.5gb (mig), a100 2g.20gb (mig)."
    assert waiting["t2"].facts["types"] == "MIG slice 3g.40gb"


def test_named_pools_restrict_nodes_and_devices() -> None:
    nodes = [a_node("a", gpus=1, gpu_pool="dev-gpus"), a_node("b", gpus=1, gpu_pool="big-gpus")]
    assert places(schedule(a_snapshot(nodes, [a_task(gpu=1000, pools=("big-gpus", "cpu-pool"))]), 0)) == {"t1": "b"}
    assert code(a_snapshot(nodes[:1], [a_task(pools=("big-gpus",))])) is ReasonCode.POOL_MISSING


def test_a_gpu_comes_from_the_named_pool_of_a_node_with_two() -> None:
    first, second = a_node("n", gpus=1, gpu_pool="p").devices[0], a_node("m", gpus=1, gpu_pool="q").devices[0]
    node = a_node("n1", gpus=1)
    node = replace(
        node,
        devices=(first, replace(second, index=1)),
        pools={**node.pools, "p": node.pools["gpu-pool"], "q": node.pools["gpu-pool"]},
    )
    assert devices(schedule(a_snapshot([node], [a_task(gpu=1000, pools=("q",))]), 0), "t1")[0][0] == "GPU-m-0"


def test_labels_select_nodes() -> None:
    nodes = [a_node("a", labels={"zone": "a"}), a_node("b", labels={"zone": "b"})]
    assert places(schedule(a_snapshot(nodes, [a_task(node_labels={"zone": "b"})]), 0)) == {"t1": "b"}
    assert code(a_snapshot(nodes, [a_task(node_labels={"zone": "c"})])) is ReasonCode.LABELS_MISMATCH


def test_an_image_needs_a_node_with_docker() -> None:
    nodes = [a_node("a"), a_node("b", runtimes=("process", "docker"))]
    assert places(schedule(a_snapshot(nodes, [a_task(image="busybox")]), 0)) == {"t1": "b"}
    assert code(a_snapshot(nodes[:1], [a_task(image="busybox")])) is ReasonCode.RUNTIME_MISSING


def test_ports_are_free_ones_of_the_node() -> None:
    snapshot = a_snapshot([a_node(port_first=500, port_count=3)], [a_task("t1", ports=2), a_task("t2", ports=1, at_ms=1)])
    plan = schedule(snapshot, 0)
    first, second = (placement.ports for placement in plan.placements)
    assert sorted(first + second) == [500, 501, 502]
    commit(snapshot, plan)
    snapshot.advance([a_task("t3", ports=1)])
    assert schedule(snapshot, 0).waiting["t3"].facts["resource"] == "ports"
    end(snapshot, "t1")
    assert schedule(snapshot, 0).placements[0].ports[0] in first


def test_another_try_gets_another_port_because_a_stranger_may_hold_the_first() -> None:
    tries = [a_snapshot([a_node(port_first=500, port_count=100)], [a_task("t1", ports=1)]) for _ in range(4)]
    for revision, snapshot in enumerate(tries):
        snapshot.revision = revision
    ports = [schedule(snapshot, 0).placements[0].ports[0] for snapshot in tries]
    assert len(set(ports)) > 2
    assert all(500 <= port < 600 for port in ports)
    assert schedule(tries[0], 0).placements[0].ports == (ports[0],)


def test_lost_and_cordoned_nodes_take_nothing() -> None:
    nodes = [replace(a_node("a"), cordoned=True), replace(a_node("b"), status=NodeStatus.LOST)]
    assert code(a_snapshot(nodes, [a_task()])) is ReasonCode.NO_NODE_READY


def test_a_control_task_uses_only_the_control_share_and_goes_first() -> None:
    node = a_node(cpu=1, control=ControlShare(slots=1, memory_bytes=GIB))
    tasks = [a_task("t1", cpu=1000, priority=100), *(a_task(f"c{i}", type="control", cpu=500, at_ms=i) for i in (5, 6))]
    plan = schedule(a_snapshot([node], tasks), 0)
    assert [placement.task for placement in plan.placements] == ["c5", "t1"]
    assert plan.waiting["c6"].code is ReasonCode.NO_CONTROL_SLOT


def test_a_control_task_ignores_pools_and_quota() -> None:
    task = a_task(type="control", pools=("nowhere",), quota_policy="gone")
    assert places(schedule(a_snapshot([a_node()], [task]), 0)) == {"t1": "n1"}


def test_replicas_of_a_service_go_to_different_nodes_first_and_are_never_blocked() -> None:
    nodes = [a_node("a", cpu=64), a_node("b", cpu=4)]
    tasks = [a_task(f"r{i}", service="web", ports=1, at_ms=i) for i in range(3)]
    snapshot = a_snapshot(nodes, tasks)
    plan = schedule(snapshot, 0)
    assert [placement.node for placement in plan.placements] == ["b", "a", "b"]
    commit(snapshot, plan)
    snapshot.advance([a_task("r3", service="web")])
    assert places(schedule(snapshot, 0)) == {"r3": "a"}


def test_a_task_that_backs_off_waits_for_its_time() -> None:
    snapshot = a_snapshot([a_node()], [a_task(not_before_ms=5000)])
    reason = schedule(snapshot, 1000).waiting["t1"]
    assert (reason.code, reason.facts["wait_ms"]) == (ReasonCode.BACKOFF, 4000)
    assert places(schedule(snapshot, 5000)) == {"t1": "n1"}
    assert schedule(snapshot, 1000).waiting["t1"] == reason


def test_a_member_of_an_array_that_has_grown_asks_for_more_than_the_others() -> None:
    members = [a_task(f"t{index}", memory_gib=1) for index in range(3)]
    members = [replace(member, spec=members[0].spec) for member in members]
    grown = replace(members[0].spec.request, memory_bytes=8 * GIB)
    tasks = [replace(members[0], grown=grown), *members[1:]]
    plan = schedule(a_snapshot([a_node(memory_gib=4)], tasks), 0)
    assert [placement.task for placement in plan.placements] == ["t1", "t2"]
    assert plan.waiting["t0"].code is ReasonCode.NO_ROOM
