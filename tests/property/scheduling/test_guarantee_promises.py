"""Through a whole life of a cluster: nobody loses what is guaranteed to it, and everybody who may start does in the end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from builders import a_node, a_snapshot, a_task, commit, end
from hypothesis import given
from hypothesis import strategies as st

from crater_core.model.plan import Plan
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import TaskStatus
from crater_core.scheduling import schedule

SETTINGS = Settings(preempt_min_run_ms=0, hold_after_ms=0, raise_after_ms=20)


def used(snapshot: Snapshot) -> Counter[str]:
    """GPUs by project."""
    held: Counter[str] = Counter()
    for allocation in snapshot.allocations.values():
        held[snapshot.tasks[allocation.task].spec.project] += allocation.held.gpu_milli // 1000
    return held


def check(snapshot: Snapshot, plan: Plan, guarantees: dict[str, tuple[int, bool]], gpus: int) -> None:
    held = used(snapshot)
    after = held.copy()
    for placement in plan.placements:
        after[snapshot.tasks[placement.task].spec.project] += len(placement.grants)
    left = after.copy()
    for preemption in plan.preemptions:
        taken = snapshot.allocations[preemption.victim]
        project = snapshot.tasks[taken.task].spec.project
        if project != snapshot.tasks[preemption.preemptor].spec.project:
            left[project] -= taken.held.gpu_milli // 1000
    for project, (guarantee, _) in guarantees.items():
        assert left[project] >= min(after[project], guarantee), "only what is borrowed is taken back"
    free = gpus - sum(held.values())
    for placement in plan.placements:
        project, asked = snapshot.tasks[placement.task].spec.project, len(placement.grants)
        held[project] += asked
        free -= asked
        if held[project] > guarantees.get(project, (0, False))[0]:
            kept = sum(max(0, g - held[name]) for name, (g, lend) in guarantees.items() if not lend and name != project)
            assert free >= kept, "who borrows leaves what is kept for others"


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.tuples(st.integers(1, 4), st.booleans()), max_size=3),
    st.lists(
        st.tuples(st.sampled_from("abcx"), st.sampled_from([1, 1, 2]), st.integers(0, 20), st.integers(1, 9), st.booleans()),
        max_size=14,
    ),
)
def test_guarantees_hold_and_block_nobody(
    nodes: list[int],
    guarantees: dict[str, tuple[int, bool]],
    work: list[tuple[str, int, int, int, bool]],
) -> None:
    policies = [
        QuotaPolicy(f"{project}-quota", (project,), guarantee=Limits(gpu_milli=1000 * guarantee), lend=lend)
        for project, (guarantee, lend) in guarantees.items()
    ]
    snapshot = a_snapshot([a_node(f"n{i}", gpus=gpus) for i, gpus in enumerate(nodes)], (), policies, settings=SETTINGS)
    tasks = [
        a_task(
            f"t{i:02d}",
            project=project,
            gpu=1000,
            cpu=0,
            memory_gib=0,
            members=members,
            at_ms=at_ms,
            strategy="preemptive" if preemptive else None,
            priority=50 + 10 * preemptive,
        )
        for i, (project, members, at_ms, _, preemptive) in enumerate(work)
    ]
    started: set[str] = set()
    ends: dict[str, int] = {}
    now_ms, moved = -1, False
    while True:
        coming = [task.queued_at_ms for task in tasks if task.queued_at_ms > now_ms]
        if not coming and not ends and not moved:
            break
        now_ms = now_ms + 1 if moved else min([*coming, *(max(at_ms, now_ms + 1) for at_ms in ends.values())])
        for task in [name for name, at_ms in ends.items() if at_ms <= now_ms]:
            end(snapshot, task)
            del ends[task]
        snapshot.advance([task for task in tasks if task.queued_at_ms == now_ms])
        plan = schedule(snapshot, now_ms)
        check(snapshot, plan, guarantees, sum(nodes))
        moved = bool(plan.placements or plan.preemptions)
        victims = {snapshot.allocations[p.victim].task: p.preemptor for p in plan.preemptions}
        commit(snapshot, plan, now_ms)
        for placement in plan.placements:
            started.add(placement.task)
            ends[placement.task] = now_ms + work[int(placement.task[1:])][3]
        for victim, by in victims.items():
            task = snapshot.tasks[victim]
            end(snapshot, victim)
            del ends[victim]
            again = Reason.of(ReasonCode.RECLAIMED, by=by)
            snapshot.advance(
                [replace(task, status=TaskStatus.QUEUED, queued_at_ms=now_ms, preemptions=task.preemptions + 1, reason=again)]
            )
    for task in tasks:
        project, asked = task.spec.project, task.spec.members
        others = sum(g for name, (g, lend) in guarantees.items() if not lend and name != project)
        if asked <= sum(nodes) and (asked <= guarantees.get(project, (0, False))[0] or asked <= sum(nodes) - others):
            assert task.id in started
    assert not snapshot.allocations
