"""What is free, on nodes and in pools."""

from __future__ import annotations

import pytest
from builders import a_node, a_snapshot, a_task, commit

from crater_core.errors import NotFound
from crater_core.model.node import PoolKind, SharingMode
from crater_core.model.resources import Amounts
from crater_core.model.units import GIB
from crater_core.scheduling import free_amounts, pool_overview, schedule


def test_free_is_allocatable_minus_what_is_given_out_and_control_tasks_cost_nothing() -> None:
    node = a_node(gpus=2, sharing=SharingMode.MPS, unwell=[1])
    snapshot = a_snapshot([node], [a_task("t1", gpu=250), a_task("c", type="control")])
    commit(snapshot, schedule(snapshot, 0))
    assert free_amounts(snapshot, "n1") == Amounts(7000, 63 * GIB, 100 * GIB, 750, 30_720)


def test_an_unknown_node_is_not_found() -> None:
    with pytest.raises(NotFound):
        free_amounts(a_snapshot(), "nope")


def test_pools_gather_their_nodes_and_count_what_is_free_where_it_can_be_used() -> None:
    nodes = [a_node("a", cpu=4, gpus=2), a_node("b", cpu=8), a_node("c", cpu=16, gpus=1, cordoned=True)]
    snapshot = a_snapshot(nodes, [a_task("t1", gpu=1000)])
    commit(snapshot, schedule(snapshot, 0))
    pools = {pool.name: pool for pool in pool_overview(snapshot)}
    assert list(pools) == ["cpu-pool", "disk-pool", "gpu-pool", "memory-pool"]
    cpu, gpu = pools["cpu-pool"], pools["gpu-pool"]
    assert (cpu.kind, cpu.nodes, cpu.capacity.cpu_milli, cpu.free.cpu_milli) == (PoolKind.CPU, ("a", "b", "c"), 28_000, 11_000)
    assert (gpu.nodes, gpu.devices, gpu.devices_free, gpu.capacity.gpu_milli, gpu.free.gpu_milli) == (
        ("a", "c"),
        3,
        1,
        3000,
        1000,
    )
