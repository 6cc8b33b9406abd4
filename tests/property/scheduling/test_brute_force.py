"""On small clusters every way of placing is tried, and the decisions must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from builders import a_node, a_snapshot, a_task, commit, end
from hypothesis import given
from hypothesis import strategies as st

from crater_core.model.allocation import Placement
from crater_core.model.node import SharingMode
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task, TaskStatus
from crater_core.scheduling import schedule

CARD = 1000
"""MiB of each card."""


@dataclass(frozen=True)
class State:
    """Free cores of each node, and free (compute, memory) of each of its devices."""

    cores: tuple[int, ...]
    devices: tuple[tuple[tuple[int, int], ...], ...]


def state_of(snapshot: Snapshot, without: frozenset[str] = frozenset(), placed: Sequence[Placement] = ()) -> State:
    """What is free without some of the tasks that run, and with some placements as if they ran."""
    cores, devices = [], []
    for name in sorted(snapshot.nodes):
        node = snapshot.nodes[name]
        allocations = [a for a in snapshot.by_node.get(name, {}).values() if a.task not in without]
        mine = [placement for placement in placed if placement.node == name]
        held = [a.held.cpu_milli for a in allocations] + [snapshot.tasks[p.task].spec.request.cpu_milli for p in mine]
        cores.append(node.allocatable.cpu_milli - sum(held))
        grants = [grant for a in (*allocations, *mine) for grant in a.grants]
        devices.append(
            tuple(
                (
                    1000 - sum(g.compute_milli for g in grants if g.uuid == device.uuid),
                    device.allocatable_memory_mib - sum(g.memory_mib for g in grants if g.uuid == device.uuid),
                )
                for device in node.devices
            )
        )
    return State(tuple(cores), tuple(devices))


def needs(task: Task) -> tuple[int, int, int, int]:
    """Cores, devices, compute and memory of each."""
    gpu = task.spec.request.gpu
    if gpu is None:
        return task.spec.request.cpu_milli, 0, 0, 0
    if gpu.exclusive:
        return task.spec.request.cpu_milli, gpu.count, 1000, CARD
    compute = gpu.compute_milli or -(-gpu.memory_mib * 1000 // CARD)
    return task.spec.request.cpu_milli, gpu.count, compute, gpu.memory_mib or CARD * compute // 1000


def ways(state: State, task: Task, shareable: bool) -> Iterator[State]:
    """Every state after placing one member."""
    cores, count, compute, memory = needs(task)
    if count and compute < 1000 and not shareable:
        return
    for node, free in enumerate(state.cores):
        if free < cores:
            continue
        fit = [i for i, (c, m) in enumerate(state.devices[node]) if c >= compute and m >= memory]
        for chosen in combinations(fit, count):
            after = tuple((c - compute, m - memory) if i in chosen else (c, m) for i, (c, m) in enumerate(state.devices[node]))
            yield State(
                (*state.cores[:node], free - cores, *state.cores[node + 1 :]),
                (*state.devices[:node], after, *state.devices[node + 1 :]),
            )


def can_place(state: State, task: Task, shareable: bool) -> bool:
    return most_placed(state, task, shareable) >= task.spec.members_fewest


def most_placed(state: State, task: Task, shareable: bool) -> int:
    """How many members find room together, by trying every way."""
    reached = {state}
    for placed in range(task.spec.members):
        # Devices of a node are alike: states that differ by their order are one.
        reached = {
            State(after.cores, tuple(tuple(sorted(devices)) for devices in after.devices))
            for before in reached
            for after in ways(before, task, shareable)
        }
        if not reached:
            return placed
    return task.spec.members


@st.composite
def tasks(draw: st.DrawFn, id: str, priority: int = 50) -> Task:
    gpu: dict[str, Any] = draw(
        st.sampled_from(
            [
                {},
                {"gpu": 1000},
                {"gpu": 2000},
                {"gpu": 300},
                {"gpu": 400, "gpu_count": 2},
                {"gpu": 600, "gpu_count": 2},
                {"gpu_memory_mib": 350},
                {"gpu": 200, "gpu_memory_mib": 700},
            ]
        )
    )
    members = draw(st.sampled_from([1, 1, 2, 3]))
    return a_task(id, cpu=draw(st.sampled_from([0, 1000, 2000, 3000])), members=members, memory_gib=0, priority=priority, **gpu)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Snapshot, bool]:
    """Up to four nodes of up to four cards, partly filled."""
    sharing = draw(st.sampled_from([SharingMode.TIME_SLICE, SharingMode.EXCLUSIVE]))
    nodes = [
        a_node(f"n{i}", cpu=draw(st.integers(1, 4)), gpus=draw(st.integers(0, 4)), sharing=sharing, gpu_memory_mib=CARD)
        for i in range(draw(st.integers(1, 4)))
    ]
    settings = Settings(passing="free", preempt_min_run_ms=0)
    snapshot = a_snapshot(nodes, [draw(tasks(f"r{i}")) for i in range(draw(st.integers(0, 4)))], settings=settings)
    commit(snapshot, schedule(snapshot, 0), 0)
    snapshot.advance([cancelled(task) for task in list(snapshot.queued.values())])
    for name in draw(st.sets(st.sampled_from(sorted(snapshot.tasks) or [""]), max_size=2)) - {""}:
        end(snapshot, name)
    return snapshot, sharing is SharingMode.TIME_SLICE


def cancelled(task: Task) -> Task:
    return replace(task, status=TaskStatus.CANCELLED)


@given(clusters(), tasks("new"))
def test_a_task_or_gang_is_placed_exactly_when_some_way_exists(cluster: tuple[Snapshot, bool], task: Task) -> None:
    snapshot, shareable = cluster
    expected = can_place(state_of(snapshot), task, shareable)
    snapshot.advance([task])
    assert bool(schedule(snapshot, 1).placements) is expected


@given(clusters(), st.data())
def test_of_five_in_line_each_is_placed_exactly_when_some_way_exists_at_its_turn(
    cluster: tuple[Snapshot, bool], data: st.DataObject
) -> None:
    snapshot, shareable = cluster
    line = [data.draw(tasks(f"q{place}", priority=90 - place)) for place in range(5)]
    snapshot.advance(line)
    plan = schedule(snapshot, 1)
    before: list[Placement] = []
    for task in line:
        mine = [placement for placement in plan.placements if placement.task == task.id]
        expected = can_place(state_of(snapshot, placed=before), task, shareable)
        assert len(mine) == (task.spec.members if expected else 0), task.id
        before += mine
    assert len(before) == len(plan.placements)
    left = state_of(snapshot, placed=before)
    assert min(left.cores) >= 0
    assert all(compute >= 0 and memory >= 0 for node in left.devices for compute, memory in node)


@given(clusters(), tasks("new"), st.integers(1, 3))
def test_an_elastic_gang_starts_with_as_many_members_as_any_way_allows(
    cluster: tuple[Snapshot, bool], task: Task, fewest: int
) -> None:
    snapshot, shareable = cluster
    task = replace(task, spec=replace(task.spec, members=4, members_min=fewest))
    most = most_placed(state_of(snapshot), task, shareable)
    snapshot.advance([task])
    assert len(schedule(snapshot, 1).placements) == (most if most >= fewest else 0)


@given(clusters(), tasks("new", priority=90))
def test_a_task_or_gang_stops_exactly_as_many_as_it_takes(cluster: tuple[Snapshot, bool], task: Task) -> None:
    snapshot, shareable = cluster
    task = replace(task, spec=replace(task.spec, strategy="preemptive"))
    snapshot.advance([task])
    plan = schedule(snapshot, 100)
    if plan.placements:
        assert plan.preemptions == ()
        return
    fewest = fewest_victims(snapshot, task, shareable)
    chosen = {snapshot.allocations[preemption.victim].task for preemption in plan.preemptions}
    assert len(chosen) == (fewest or 0)
    if chosen:
        assert can_place(state_of(snapshot, frozenset(chosen)), task, shareable)
    for spared in chosen:
        assert not can_place(state_of(snapshot, frozenset(chosen - {spared})), task, shareable)


def fewest_victims(snapshot: Snapshot, task: Task, shareable: bool) -> int | None:
    """By trying every set of what runs: how many must stop; None when no set is enough."""
    running = sorted(snapshot.by_task)
    sizes = [
        size
        for size in range(1, len(running) + 1)
        for chosen in combinations(running, size)
        if can_place(state_of(snapshot, frozenset(chosen)), task, shareable)
    ]
    return min(sizes, default=None)
