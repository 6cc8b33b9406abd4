"""With true time limits the first in line never starts later than was foretold, and nobody waits for ever."""

from __future__ import annotations

import heapq
from typing import Any

from builders import a_node, a_snapshot, a_task, commit, end
from hypothesis import given
from hypothesis import strategies as st

from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import schedule
from crater_core.scheduling.cycle import Cycle
from crater_core.scheduling.forecast import UNKNOWN
from crater_core.scheduling.memory import memory_of
from crater_core.scheduling.order import passed_at_most_ms

Job = tuple[int, int, dict[str, Any]]
"""When it comes, how long it runs, what it asks for."""


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    ask: dict[str, Any] = draw(
        st.sampled_from(
            [
                *({"cpu": 1000}, {"cpu": 3000}, {"cpu": 4000}, {"cpu": 0, "gpu": 1000}, {"cpu": 1000, "gpu": 2000}),
                *({"cpu": 2000, "members": 2}, {"cpu": 0, "gpu": 1000, "members": 3}),
            ]
        )
    )
    return draw(st.integers(0, 40)), draw(st.integers(1, 30)), ask


NODES = st.lists(st.sampled_from([(4, 0), (4, 2), (2, 1)]), min_size=1, max_size=3)


def play(
    nodes: list[tuple[int, int]], work: list[Job], settings: Settings, limits: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """When each job started, and the earliest start that was foretold for it while it was first in line."""
    snapshot = a_snapshot([a_node(f"n{i}", cpu=cpu, gpus=gpus) for i, (cpu, gpus) in enumerate(nodes)], settings=settings)
    events = [(at, 1, f"j{i:02d}") for i, (at, _, _) in enumerate(work)]
    heapq.heapify(events)
    started: dict[str, int] = {}
    foretold: dict[str, int] = {}
    while events:
        now_ms = events[0][0]
        while events and events[0][0] == now_ms:
            _, comes, name = heapq.heappop(events)
            _, runs_ms, ask = work[int(name[1:])]
            if not comes:
                end(snapshot, name)
            elif could_run(nodes, ask):
                snapshot.advance([a_task(name, at_ms=now_ms, time_limit_ms=runs_ms if limits else None, memory_gib=0, **ask)])
        for name in look(snapshot, now_ms, foretold):
            started[name] = now_ms
            heapq.heappush(events, (now_ms + work[int(name[1:])][1], 0, name))
    return started, foretold


def could_run(nodes: list[tuple[int, int]], ask: dict[str, Any]) -> bool:
    """On the empty cluster, all members together."""
    each = [(cpu * 1000, ask.get("cpu", 0), gpus * 1000, ask.get("gpu", 0)) for cpu, gpus in nodes]
    copies = (min(cpu // wants if wants else 9, gpu // asks if asks else 9) for cpu, wants, gpu, asks in each)
    return sum(copies) >= ask.get("members", 1)


def look(snapshot: Snapshot, now_ms: int, foretold: dict[str, int]) -> list[str]:
    memory = memory_of(snapshot)
    memory.queue.sync(snapshot, now_ms)
    cycle = Cycle(snapshot, memory, now_ms)
    plan = cycle.run()
    first = min(((snapshot.tasks[name].queued_at_ms, name) for name in plan.waiting), default=(0, ""))[1]
    for keep in cycle.keeping.rows.values():
        if keep.holder == first and keep.until_ms < UNKNOWN:
            foretold[first] = min(foretold.get(first, UNKNOWN), max(now_ms, keep.until_ms))
    commit(snapshot, plan, now_ms)
    return list(dict.fromkeys(placement.task for placement in plan.placements))


@given(NODES, st.lists(jobs(), min_size=2, max_size=14))
def test_the_first_in_line_starts_no_later_than_foretold(nodes: list[tuple[int, int]], work: list[Job]) -> None:
    started, foretold = play(nodes, work, Settings(), limits=True)
    assert all(started[name] <= at for name, at in foretold.items())


@given(NODES, st.lists(jobs(), min_size=2, max_size=14), st.booleans())
def test_everything_that_could_run_has_run_in_the_end(nodes: list[tuple[int, int]], work: list[Job], limits: bool) -> None:
    started, _ = play(nodes, work, Settings(hold_after_ms=20), limits)
    fits = [f"j{i:02d}" for i, (_, _, ask) in enumerate(work) if could_run(nodes, ask)]
    assert sorted(started) == fits


@given(NODES, st.integers(1, 20))
def test_a_stream_of_small_tasks_does_not_starve_a_wide_one(nodes: list[tuple[int, int]], runs_ms: int) -> None:
    """Every millisecond another small task comes. The wide one starts when those that ran at the end of its patience have
    ended: the bound that the documentation states.
    """
    patience = 10
    widest = max(cpu for cpu, _ in nodes) * 1000
    work: list[Job] = [(5, 1, {"cpu": widest})]
    work += [(0, runs_ms, {"cpu": 1000})] * sum(cpu for cpu, _ in nodes)
    work += [(at, runs_ms, {"cpu": 1000}) for at in range(6, 60)]
    for claimed_ms in (None, 1):  # Nothing is foretold of the small ones; and each is foretold to be gone at once, wrongly.
        told = [(at, runs, {**ask, "foretold_ms": claimed_ms}) for at, runs, ask in work]
        started, _ = play(nodes, told, Settings(hold_after_ms=patience), limits=False)
        assert started["j00"] <= 5 + patience + runs_ms + 1


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 100), st.sampled_from("xyz"), st.integers(1, 5)), max_size=60),
    st.sampled_from([5, 20]),
)
def test_nobody_who_comes_long_after_a_task_goes_before_it(work: list[tuple[int, int, str, int]], raise_after_ms: int) -> None:
    """One place, so that the order is all: priorities, projects and run times as they come."""
    settings = Settings(raise_after_ms=raise_after_ms)
    snapshot = a_snapshot([a_node(cpu=1)], settings=settings)
    tasks = [
        a_task(f"j{i:02d}", at_ms=at, priority=priority, project=project) for i, (at, priority, project, _) in enumerate(work)
    ]
    started: list[str] = []
    ends_ms = 0
    for now_ms in range(600):
        snapshot.advance([task for task in tasks if task.queued_at_ms == now_ms])
        if now_ms == ends_ms and started:
            end(snapshot, started[-1])
        plan = schedule(snapshot, now_ms)
        commit(snapshot, plan, now_ms)
        for placement in plan.placements:
            started.append(placement.task)
            ends_ms = now_ms + work[int(placement.task[1:])][3]
    assert sorted(started) == [task.id for task in tasks]
    by_name = {task.id: task for task in tasks}
    for place, later in enumerate(started):
        for name in started[place + 1 :]:
            bound_ms = passed_at_most_ms(by_name[name].spec.priority, settings)
            assert bound_ms is not None
            assert by_name[later].queued_at_ms < by_name[name].queued_at_ms + bound_ms, f"{later} passed {name}"
