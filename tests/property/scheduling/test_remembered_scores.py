"""Scores and devices that are remembered and brought up to date by change equal those worked out from nothing."""

from __future__ import annotations

from dataclasses import replace

from builders import a_node, a_snapshot, a_task, commit, end
from hypothesis import given
from hypothesis import strategies as st

from crater_core.model.node import Node, SharingMode
from crater_core.model.resources import GpuRequest, Request, TypicalRequest
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task
from crater_core.scheduling import STRATEGIES, schedule
from crater_core.scheduling.devices import choose_devices
from crater_core.scheduling.fits import Fits
from crater_core.scheduling.ledger import Ledger
from crater_core.scheduling.memory import Memory, memory_of
from crater_core.scheduling.prices import price_table
from crater_core.scheduling.shapes import Shape, shape_of

WORKLOAD = (
    TypicalRequest(Request(1000, gpu=GpuRequest(1)), 5),
    TypicalRequest(Request(500, gpu=GpuRequest(1, 300, exclusive=False)), 3),
    TypicalRequest(Request(2000, gpu=GpuRequest(2, types=("t4",))), 2),
)
SHAPES = (
    {"cpu": 500},
    {"cpu": 1000, "ports": 1, "disk_gib": 1},
    {"cpu": 100, "gpu": 1000},
    {"cpu": 100, "gpu": 2000, "gpu_types": ("t4",)},
    {"cpu": 100, "gpu": 300, "user": "ann"},
    {"cpu": 100, "gpu": 300, "user": "bob"},
    {"cpu": 100, "gpu": 200, "gpu_count": 2},
    {"cpu": 100, "gpu_memory_mib": 500},
    {"cpu": 10, "type": "control"},
)
"""Few, so that each is looked at again and again while others change the nodes."""


@st.composite
def nodes(draw: st.DrawFn, name: str) -> Node:
    return a_node(
        name,
        cpu=draw(st.integers(1, 8)),
        memory_gib=8,
        disk_gib=draw(st.integers(0, 4)),
        gpus=draw(st.integers(0, 4)),
        sharing=draw(st.sampled_from([SharingMode.EXCLUSIVE, SharingMode.MPS, SharingMode.TIME_SLICE])),
        gpu_type=draw(st.sampled_from(["a100", "t4"])),
        gpu_memory_mib=draw(st.sampled_from([1000, 3001])),
        unwell=draw(st.sets(st.integers(0, 3), max_size=1)),
        port_count=draw(st.integers(0, 3)),
    )


def a_cluster(some: list[Node], tasks: list[Task], priced: bool) -> Snapshot:
    snapshot = a_snapshot(some, tasks, settings=Settings(workload=WORKLOAD))
    snapshot.prices = price_table(some, WORKLOAD) if priced else None
    return snapshot


def assert_as_from_nothing(memory: Memory, shapes: list[Shape], other: Memory | None = None) -> None:
    """The scores are those of new columns of the same memory, or of another memory."""
    for shape in shapes:
        known = memory.fits(shape)
        fresh = other.fits(shape) if other else Fits(memory.columns, shape, STRATEGIES[shape.strategy], memory.mix)
        assert (known.best(), known.score.tolist()) == (fresh.best(), fresh.score.tolist())
        if known.best() >= 0 and known.count:
            assert choose_devices(known, known.best()) == choose_devices(fresh, fresh.best())


@given(st.lists(st.integers(0, 4), min_size=1), st.data())
def test_scores_follow_what_is_taken_and_given_back(names: list[int], data: st.DataObject) -> None:
    snapshot = a_cluster([data.draw(nodes(f"n{name}")) for name in sorted(set(names))], [], data.draw(st.booleans()))
    strategies = st.sampled_from(sorted(STRATEGIES))
    specs = [a_task(**{"cpu": 0, "memory_gib": 0, "strategy": data.draw(strategies), **one}).spec for one in SHAPES]
    shapes = [shape_of(spec, snapshot.settings) for spec in specs]
    memory = memory_of(snapshot)
    ledger, marks = Ledger(memory.columns), [0]
    for step in range(data.draw(st.integers(1, 12))):
        fits = memory.fits(data.draw(st.sampled_from(shapes)))
        row = fits.best()
        if row >= 0:
            ledger.take(fits, row, f"t{step}", 0)
            marks.append(ledger.mark())
        if data.draw(st.integers(0, 3)) == 0:
            ledger.rollback(data.draw(st.sampled_from(marks)))
            marks = [mark for mark in marks if mark <= ledger.mark()]
        assert_as_from_nothing(memory, data.draw(st.lists(st.sampled_from(shapes), max_size=3)))
    ledger.rollback(0)
    untouched = a_cluster(list(snapshot.nodes.values()), [], False)
    untouched.prices = snapshot.prices
    assert_as_from_nothing(memory, shapes, memory_of(untouched))


@given(st.integers(1, 4), st.data())
def test_a_long_life_of_placing_and_ending_gives_the_plans_of_a_fresh_memory(count: int, data: st.DataObject) -> None:
    some, priced = [data.draw(nodes(f"n{index}")) for index in range(count)], data.draw(st.booleans())
    snapshot, strategies = a_cluster(some, [], priced), st.sampled_from(sorted(STRATEGIES))
    for step in range(data.draw(st.integers(1, 6))):
        chosen = data.draw(st.lists(st.tuples(st.sampled_from(SHAPES), strategies), max_size=6))
        fields = [{"cpu": 0, "memory_gib": 0, "strategy": strategy, **one} for one, strategy in chosen]
        snapshot.advance([a_task(f"t{step}-{index}", at_ms=step, **one) for index, one in enumerate(fields)])
        fresh = a_cluster(list(snapshot.nodes.values()), list(snapshot.tasks.values()), False)
        fresh.prices = snapshot.prices
        fresh.advance([replace(allocation) for allocation in snapshot.allocations.values()])
        plan = schedule(snapshot, step)
        assert plan == schedule(fresh, step)
        commit(snapshot, plan, step)
        for task in data.draw(st.sets(st.sampled_from(sorted(snapshot.by_task) or [""]))) - {""}:
            end(snapshot, task)
