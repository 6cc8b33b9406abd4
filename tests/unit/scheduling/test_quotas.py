"""Quota policies: limits in all and for each user, derived from live allocations."""

from __future__ import annotations

import pytest
from builders import a_node, a_snapshot, a_spec, a_task, commit, end

from crater_core.model.node import Node, SharingMode
from crater_core.model.plan import Admitted, Refused
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import Amounts, GpuRequest, Request
from crater_core.model.units import GIB
from crater_core.scheduling import admit, pool_overview, quota_use, schedule


def placed(snapshot: object) -> set[str]:
    return {placement.task for placement in schedule(snapshot, 0).placements}  # type: ignore[arg-type]


def test_a_policy_is_never_passed_and_the_reason_has_the_numbers() -> None:
    policy = QuotaPolicy("training-quota", ("ml",), Limits(gpu_milli=2000))
    tasks = [a_task(f"t{i}", project="ml", gpu=1000, at_ms=i) for i in range(3)]
    plan = schedule(a_snapshot([a_node(gpus=8)], tasks, [policy]), 0)
    assert len(plan.placements) == 2
    assert plan.waiting["t2"] == Reason.of(
        ReasonCode.QUOTA_USED_UP, policy="training-quota", resource="gpu", limit=2000, used=2000, wanted=1000
    )


def test_use_falls_when_a_task_ends() -> None:
    policy = QuotaPolicy("q", ("ml",), Limits(cpu_milli=1000))
    snapshot = a_snapshot([a_node()], [a_task("t1", project="ml"), a_task("t2", project="ml", at_ms=1)], [policy])
    commit(snapshot, schedule(snapshot, 0))
    assert placed(snapshot) == set()
    end(snapshot, "t1")
    assert placed(snapshot) == {"t2"}


def test_a_share_by_memory_goes_where_it_takes_less_compute_when_quota_is_short() -> None:
    policy = QuotaPolicy("q", ("ml",), Limits(gpu_milli=400))
    nodes = [
        a_node("big", cpu=64, gpus=2, sharing=SharingMode.TIME_SLICE, gpu_memory_mib=10_000),
        a_node("small", cpu=2, gpus=1, sharing=SharingMode.TIME_SLICE, gpu_memory_mib=5_000),
    ]
    share = a_task("share", project="ml", gpu_memory_mib=2_500)
    plan = schedule(a_snapshot(nodes, [share], [policy]), 0)
    assert [(p.node, p.grants[0].compute_milli) for p in plan.placements] == [("big", 250)]
    [on_small] = schedule(a_snapshot(nodes, [a_task("share", gpu_memory_mib=2_500)]), 0).placements
    assert (on_small.node, on_small.grants[0].compute_milli) == ("small", 500), "the best place, had quota allowed it"


def test_a_share_counts_as_its_share() -> None:
    policy = QuotaPolicy("q", ("ml",), Limits(gpu_milli=1000))
    tasks = [a_task(f"t{i}", project="ml", gpu=250, at_ms=i) for i in range(5)]
    assert len(placed(a_snapshot([a_node(gpus=4, sharing=SharingMode.MPS)], tasks, [policy]))) == 4


def slices(name: str = "mig", count: int = 7) -> Node:
    model = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    return a_node(name, gpus=count, model=model, sharing=SharingMode.MIG, gpu_memory_mib=4_864, card_milli=142, cpu=64)


def test_a_slice_counts_as_its_part_of_a_card() -> None:
    policy = QuotaPolicy("q", ("ml",), Limits(gpu_milli=1000))
    tasks = [a_task(f"t{i}", project="ml", gpu=1000, gpu_types=("1g.5gb",), at_ms=i) for i in range(8)]
    snapshot = a_snapshot([slices(count=14)], tasks, [policy])
    plan = schedule(snapshot, 0)
    assert len(plan.placements) == 7
    assert plan.waiting["t7"] == Reason.of(ReasonCode.QUOTA_USED_UP, policy="q", resource="gpu", limit=1000, used=994, wanted=142)
    assert {placement.grants[0].compute_milli for placement in plan.placements} == {1000}, "each has all of its slice"
    commit(snapshot, plan)
    assert quota_use(snapshot)["q"].used.gpu_milli == 994
    assert schedule(snapshot, 0).waiting["t7"].code is ReasonCode.QUOTA_USED_UP
    (pool,) = (pool for pool in pool_overview(snapshot) if pool.name == "gpu-pool")
    assert (pool.capacity.gpu_milli, pool.free.gpu_milli, pool.devices_free) == (14 * 142, 7 * 142, 7)


def test_a_card_or_a_slice_is_a_slice_where_quota_has_no_room_for_a_card() -> None:
    policy = QuotaPolicy("q", ("ml",), Limits(gpu_milli=500))
    nodes = [a_node("card", cpu=2, gpus=1), slices()]
    tasks = [a_task("t1", project="ml", gpu=1000, gpu_types=("a100", "1g.5gb"))]
    assert [(p.node, p.grants[0].counts_milli) for p in schedule(a_snapshot(nodes, tasks, [policy]), 0).placements] == [
        ("mig", 142)
    ]
    waits = schedule(a_snapshot(nodes[:1], tasks, [policy]), 0).waiting["t1"]
    assert (waits.code, waits.facts["wanted"]) == (ReasonCode.QUOTA_USED_UP, 1000)
    assert isinstance(admit(tasks[0].spec, a_snapshot(nodes, (), [policy])), Admitted)
    assert isinstance(admit(a_spec(project="ml", gpu=1000), a_snapshot(nodes, (), [policy])), Refused)


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        (GpuRequest(1), 1000),
        (GpuRequest(1, 250, exclusive=False), 250),
        (GpuRequest(1, 0, 1000, exclusive=False), 0),
        (GpuRequest(1, mig_profile="3g.40gb"), 428),
        (GpuRequest(1, mig_profile="1c.3g.40gb"), 142),
        (GpuRequest(1, mig_profile="any"), 142),
        (GpuRequest(1, types=("a100", "7g.80gb", "nvidia a100-sxm4-40gb mig 2g.10gb")), 285),
    ],
)
def test_what_a_request_counts_at_least_is_known_before_its_device(asked: GpuRequest, least: int) -> None:
    assert Request(gpu=asked).amounts.gpu_milli == least


def test_a_share_by_memory_counts_the_compute_it_gets() -> None:
    policy = QuotaPolicy("q", ("ml",), Limits(gpu_milli=500))
    tasks = [a_task(f"t{i}", project="ml", gpu_memory_mib=20_480, at_ms=i) for i in range(2)]
    plan = schedule(a_snapshot([a_node(gpus=4, sharing=SharingMode.MPS)], tasks, [policy]), 0)
    assert plan.waiting["t1"].facts["used"] == 500


def test_a_user_limit_holds_for_each_user_alone() -> None:
    policy = QuotaPolicy("q", ("ml",), user_limits=Limits(cpu_milli=1000))
    tasks = [a_task(f"{user}{i}", project="ml", user=user, at_ms=i) for i in range(2) for user in ("ann", "bob")]
    assert placed(a_snapshot([a_node()], tasks, [policy])) == {"ann0", "bob0"}


def test_a_named_policy_counts_alone() -> None:
    policies = [QuotaPolicy("small", ("ml",), Limits(cpu_milli=1)), QuotaPolicy("large", (), Limits(cpu_milli=2000))]
    snapshot = a_snapshot([a_node()], [a_task("t1", project="ml"), a_task("t2", project="ml", quota_policy="large")], policies)
    assert placed(snapshot) == {"t2"}


def test_every_policy_of_the_project_counts_without_a_name() -> None:
    policies = [QuotaPolicy("wide", ("ml",), Limits(cpu_milli=9000)), QuotaPolicy("tight", ("ml", "x"), Limits(cpu_milli=1000))]
    tasks = [a_task("t1", project="ml"), a_task("t2", project="ml", at_ms=1)]
    assert schedule(a_snapshot([a_node()], tasks, policies), 0).waiting["t2"].facts["policy"] == "tight"


def test_a_project_without_a_policy_has_no_limit() -> None:
    assert placed(a_snapshot([a_node()], [a_task("t1")], [QuotaPolicy("q", ("other",), Limits(cpu_milli=1))])) == {"t1"}


def test_use_is_shown_in_all_and_by_user() -> None:
    policy = QuotaPolicy("q", ("ml",))
    tasks = [
        a_task("t1", project="ml", user="ann", gpu=500),
        a_task("t2", project="ml", user="bob", memory_gib=2),
        a_task("c", project="ml", type="control"),
    ]
    snapshot = a_snapshot([a_node(gpus=1, sharing=SharingMode.MPS)], tasks, [policy])
    commit(snapshot, schedule(snapshot, 0))
    use = quota_use(snapshot)["q"]
    assert use.used == Amounts(2000, 3 * GIB, 0, 500, 20_480)
    assert use.by_user["bob"] == Amounts(1000, 2 * GIB)
