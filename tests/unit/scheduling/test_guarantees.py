"""Guarantees: kept free or lent, taken back from those who borrow, and never in each other's way."""

from __future__ import annotations

from typing import Any

from builders import a_node, a_snapshot, a_task, commit, end

from crater_core.lifecycle import apply
from crater_core.lifecycle.inputs import Planned, Report
from crater_core.model.allocation import AllocationStatus
from crater_core.model.plan import Plan
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.resources import Amounts
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import borrowed, explain, schedule

LATER = 100_000


def guaranteed(name: str, gpus: int, *, lend: bool = False, limit: int | None = None) -> QuotaPolicy:
    """For the project of the same name."""
    limits = Limits(gpu_milli=None if limit is None else 1000 * limit)
    return QuotaPolicy(f"{name}-quota", (name,), limits, guarantee=Limits(gpu_milli=1000 * gpus), lend=lend)


def gpu_tasks(project: str, count: int, **more: Any) -> list[Any]:
    return [a_task(f"{project}{i}", project=project, gpu=1000, cpu=0, memory_gib=0, at_ms=i, **more) for i in range(count)]


def a_cluster(policies: list[QuotaPolicy], *running: Any, gpus: int = 4) -> Snapshot:
    snapshot = a_snapshot([a_node(gpus=gpus)], running, policies)
    commit(snapshot, schedule(snapshot, 0))
    return snapshot


def placed(plan: Plan) -> list[str]:
    return [placement.task for placement in plan.placements]


def test_a_guarantee_that_is_not_lent_is_kept_free_and_the_reason_has_the_numbers() -> None:
    snapshot = a_cluster([guaranteed("a", 3)], *gpu_tasks("x", 3))
    assert sorted(snapshot.by_task) == ["x0"]
    reason = schedule(snapshot, 1).waiting["x1"]
    facts = {"resource": "gpu", "wanted": 1000, "free": 3000, "kept": 3000, "policy": "a-quota"}
    assert reason == Reason(ReasonCode.KEPT_FOR_GUARANTEE, facts)
    assert sentence(reason) == "3 GPU are free, of which 3 are kept for what is guaranteed to a-quota; this asks for 1."
    assert explain(snapshot, "x1", 1).reason == reason


def test_what_the_owner_uses_is_kept_no_longer() -> None:
    snapshot = a_cluster([guaranteed("a", 2)], *gpu_tasks("a", 1))
    snapshot.advance(gpu_tasks("x", 3))
    assert placed(schedule(snapshot, 1)) == ["x0", "x1"]


def test_other_resources_are_not_held_up() -> None:
    snapshot = a_cluster([guaranteed("a", 4)])
    snapshot.advance([a_task("x0", project="x", cpu=8000)])
    assert placed(schedule(snapshot, 1)) == ["x0"]


def test_a_guarantee_that_is_lent_may_be_used_by_all() -> None:
    snapshot = a_cluster([guaranteed("a", 3, lend=True)], *gpu_tasks("x", 4))
    assert len(snapshot.by_task) == 4


def test_what_was_lent_is_taken_back_and_the_victim_is_told_who_did() -> None:
    snapshot = a_snapshot(
        [a_node(f"n{i}", gpus=1) for i in range(4)], gpu_tasks("x", 4, priority=99), [guaranteed("a", 2, lend=True)]
    )
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance(gpu_tasks("a", 3, priority=1))
    plan = schedule(snapshot, LATER)
    assert [(p.preemptor, p.policy) for p in plan.preemptions] == [("a0", "a-quota"), ("a1", "a-quota")]
    assert {snapshot.allocations[p.victim].task for p in plan.preemptions} == {"x0", "x1"}
    assert plan.waiting["a0"] == Reason.of(ReasonCode.WAITING_FOR_PREEMPTION, victims=1)
    assert plan.waiting["a2"].code is ReasonCode.NO_ROOM, "the third would itself be borrowed"
    snapshot.advance(apply(snapshot, Planned(plan, ()), LATER).puts)
    for allocation in [a for a in snapshot.allocations.values() if a.status is AllocationStatus.STOPPING]:
        over = Report(allocation.node, allocation.id, allocation.token, AllocationStatus.CANCELLED, LATER)
        snapshot.advance(apply(snapshot, over, LATER).puts)
    victim = snapshot.tasks["x0"]
    assert sentence(victim.reason) == "It made room for a0: quota policy a-quota took back what it had lent."
    assert (victim.preemptions, victim.excused) == (1, 1)
    assert placed(schedule(snapshot, LATER + 1)) == ["a0", "a1"], "the room is for whom it was made"


def test_nothing_is_taken_from_what_is_guaranteed_to_others() -> None:
    nodes = [a_node(f"n{i}", gpus=1) for i in range(4)]
    for guarantee, taken in ((1, 3), (2, 2), (3, 1), (4, 0)):
        policies = [guaranteed("a", 3, lend=True), guaranteed("b", guarantee, lend=True)]
        snapshot = a_snapshot(nodes, gpu_tasks("b", 4), policies)
        commit(snapshot, schedule(snapshot, 0))
        snapshot.advance(gpu_tasks("a", 3))
        assert len(schedule(snapshot, LATER).preemptions) == taken


def test_what_is_being_stopped_already_counts_as_given_back() -> None:
    snapshot = a_cluster([guaranteed("a", 2, lend=True), guaranteed("b", 3, lend=True)], *gpu_tasks("b", 4))
    snapshot.advance(gpu_tasks("a", 1))
    snapshot.advance(apply(snapshot, Planned(schedule(snapshot, LATER), ()), LATER).puts)
    snapshot.advance(gpu_tasks("a", 2)[1:])
    assert schedule(snapshot, LATER + 1).preemptions == ()


def test_a_borrower_that_has_just_started_or_was_stopped_often_is_spared() -> None:
    snapshot = a_cluster([guaranteed("a", 2, lend=True)], *gpu_tasks("x", 4))
    snapshot.advance(gpu_tasks("a", 1))
    assert schedule(snapshot, Settings().preempt_min_run_ms - 1).preemptions == ()
    assert len(schedule(snapshot, Settings().preempt_min_run_ms).preemptions) == 1


def test_borrowers_run_up_to_their_limit() -> None:
    snapshot = a_cluster([guaranteed("a", 1, lend=True, limit=3)], *gpu_tasks("a", 4))
    assert len(snapshot.by_task) == 3
    assert schedule(snapshot, 1).waiting["a3"].code is ReasonCode.QUOTA_USED_UP
    assert borrowed(Amounts(gpu_milli=3000), Limits(gpu_milli=1000)) == Amounts(gpu_milli=2000)


def test_guarantees_that_add_up_to_more_than_there_is_block_nobody() -> None:
    """Each is kept from the other, and yet every GPU is used by those inside their own."""
    snapshot = a_cluster([guaranteed("a", 3), guaranteed("b", 3)], *gpu_tasks("a", 3), *gpu_tasks("b", 3))
    assert len(snapshot.by_task) == 4


def test_preemption_by_priority_does_not_cut_into_a_guarantee() -> None:
    snapshot = a_cluster([guaranteed("a", 2)], *gpu_tasks("a", 4, priority=10))
    urgent = a_task("urgent", project="x", gpu=3000, cpu=0, priority=90, strategy="preemptive")
    snapshot.advance([urgent])
    assert schedule(snapshot, LATER).preemptions == ()
    end(snapshot, "a3")
    snapshot.advance([a_task("small", project="x", gpu=2000, cpu=0, priority=90, strategy="preemptive")])
    assert len(schedule(snapshot, LATER).preemptions) == 1


def test_a_gang_takes_back_on_several_nodes() -> None:
    nodes = [a_node(name, gpus=2) for name in "pqr"]
    snapshot = a_snapshot(nodes, gpu_tasks("x", 6), [guaranteed("a", 4, lend=True)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("a0", project="a", gpu=2000, cpu=0, members=2)])
    plan = schedule(snapshot, LATER)
    stopped = [snapshot.allocations[preemption.victim].node for preemption in plan.preemptions]
    assert sorted(stopped) in (["p", "p", "q", "q"], ["p", "p", "r", "r"], ["q", "q", "r", "r"])


def test_the_owner_is_patient_for_as_long_as_the_operator_says() -> None:
    snapshot = a_cluster([guaranteed("a", 2, lend=True)], *gpu_tasks("x", 4))
    snapshot.settings = Settings(reclaim_after_ms=LATER)
    snapshot.advance(gpu_tasks("a", 1))
    assert schedule(snapshot, LATER - 1).preemptions == ()
    assert [one.preemptor for one in schedule(snapshot, LATER).preemptions] == ["a0"]
