"""Quota policies: limits in all and for each user, derived from live allocations."""

from __future__ import annotations

from builders import a_node, a_snapshot, a_task, commit, end

from crater_core.model.node import SharingMode
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import Amounts
from crater_core.model.units import GIB
from crater_core.scheduling import quota_use, schedule


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
