"""Room is kept useful for the tasks that usually come."""

from __future__ import annotations

from typing import Any

import numpy as np
from builders import a_node, a_snapshot, a_spec, a_task, commit

from crater_core.model.node import Node, SharingMode
from crater_core.model.resources import GpuRequest, Request, TypicalRequest
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import add_strategy, learn_workload, schedule
from crater_core.scheduling.memory import memory_of
from crater_core.scheduling.strategies import STRATEGIES

WHOLE = TypicalRequest(Request(4000, gpu=GpuRequest(1)), 6)
PAIR = TypicalRequest(Request(8000, gpu=GpuRequest(2)), 2)
HALF = TypicalRequest(Request(2000, gpu=GpuRequest(1, 500, exclusive=False)), 2)
TIME_SLICE = SharingMode.TIME_SLICE


def a_cluster(nodes: list[Node], *workload: TypicalRequest, running: tuple[Any, ...] = ()) -> Snapshot:
    snapshot = a_snapshot(nodes, running, settings=Settings(strategy="fragmentation_aware", workload=workload))
    commit(snapshot, schedule(snapshot, 0))
    assert not snapshot.queued
    return snapshot


def place(snapshot: Snapshot, **task: Any) -> tuple[str, list[int]]:
    snapshot.advance([a_task("new", **task)])
    placement = schedule(snapshot, 1).placements[0]
    return placement.node, [grant.index for grant in placement.grants]


def fragmentation(snapshot: Snapshot, node: str) -> float:
    """Of one node, in thousandths of a device, worked out from the definition."""
    columns = memory_of(snapshot).columns
    row = columns.row_of[node]
    cpu, free = int(columns.free[row, 0]), columns.compute[row].tolist()
    total = 0
    for one in snapshot.settings.workload:
        gpu = one.request.gpu
        enough = [room for room in free if gpu and room >= gpu.compute_milli]
        if gpu is None or cpu < one.request.cpu_milli or len(enough) < gpu.count:
            total += one.weight * sum(free)
        else:
            total += one.weight * sum(room for room in free if room < gpu.compute_milli)
    return total / sum(one.weight for one in snapshot.settings.workload)


def test_the_tables_give_the_fragmentation_of_the_definition() -> None:
    running = (a_task("r1", gpu=500, cpu=3000), a_task("r2", gpu=1000, cpu=0), a_task("r3", gpu=300, cpu=0))
    nodes = [a_node("a", gpus=4, sharing=TIME_SLICE), a_node("b", cpu=2, gpus=2)]
    snapshot = a_cluster(nodes, WHOLE, PAIR, HALF, TypicalRequest(Request(1000), 3), running=running)
    memory = memory_of(snapshot)
    rows = np.arange(2)
    device, whole = memory.mix.tables(rows, memory.columns.free[:, 0])
    room = memory.columns.compute
    told = memory.mix.by_device.take(device[:, None] + room).sum(1) + memory.mix.by_whole.take(whole + (room == 1000).sum(1))
    assert (told / memory.mix.unit).tolist() == [fragmentation(snapshot, "a"), fragmentation(snapshot, "b")]


def test_a_share_goes_where_it_leaves_whole_devices_whole() -> None:
    node = a_node(gpus=2, sharing=TIME_SLICE)
    assert place(a_cluster([node], WHOLE, HALF, running=(a_task("r", gpu=500, cpu=0),)), gpu=500, cpu=0) == ("n1", [0])


def test_cores_are_left_where_devices_are_free() -> None:
    """Taking the last cores beside two free devices would strand them."""
    nodes = [a_node("a", cpu=8, gpus=2), a_node("b", cpu=16, gpus=2)]
    assert place(a_cluster(nodes, WHOLE), cpu=6000)[0] == "b"


def test_a_task_that_can_run_anywhere_spares_the_type_that_others_name() -> None:
    nodes = [a_node("a", gpus=1, gpu_type="t4", model="T4"), a_node("b", gpus=1)]
    wants_t4 = TypicalRequest(Request(1000, gpu=GpuRequest(1, types=("t4",))), 3)
    assert place(a_cluster(nodes, WHOLE, wants_t4), gpu=1000)[0] == "b"
    assert place(a_cluster(nodes, WHOLE, wants_t4), gpu=1000, gpu_types=("t4",))[0] == "a"


def test_the_workload_is_learnt_from_what_is_asked_for_most() -> None:
    specs = [a_spec(gpu=1000)] * 90 + [a_spec(gpu=500)] * 8 + [a_spec(cpu=1)] * 2 + [a_spec(type="control")] * 50
    learnt = learn_workload(specs)
    assert [(one.request.gpu, one.weight) for one in learnt] == [(GpuRequest(1), 90), (GpuRequest(1, 500, exclusive=False), 8)]


def test_a_strategy_from_outside_can_be_chosen() -> None:
    class LastByName:
        def score(self, fits: Any, rows: Any, devices: Any) -> Any:
            return rows

    add_strategy("last_by_name", LastByName())
    try:
        snapshot = a_snapshot([a_node("a"), a_node("z")], [a_task("t", strategy="last_by_name")])
        assert schedule(snapshot, 0).placements[0].node == "z"
    finally:
        del STRATEGIES["last_by_name"]
