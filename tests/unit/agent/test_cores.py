"""Cores of one's own: whole, near each other, and never two owners."""

from __future__ import annotations

import asyncio

from crater_agent.cores import Cores, choose, parse
from crater_core.wire.agents import Lease

TWO_NODES = {core: core // 4 for core in range(8)}


def test_cores_come_from_the_fullest_memory_node_that_has_enough():
    assert choose([0, 1, 2, 3, 6, 7], 2, TWO_NODES) == (6, 7)
    assert choose([0, 1, 2, 3, 6, 7], 3, TWO_NODES) == (0, 1, 2)


def test_the_memory_node_of_the_gpu_goes_first():
    assert choose([0, 1, 2, 3, 6, 7], 2, TWO_NODES, near=0) == (0, 1)
    assert choose([0, 1, 2, 3, 6, 7], 3, TWO_NODES, near=1) == (0, 1, 2)


def test_only_what_no_memory_node_can_hold_is_spread():
    assert choose([0, 1, 2, 6, 7], 4, TWO_NODES) == (0, 1, 2, 6)
    assert choose([0, 1], 3, TWO_NODES) == ()


def test_a_core_has_one_owner_and_the_rest_is_shared():
    cores = Cores(range(4))
    assert cores.take("a", 2) == (0, 1)
    assert cores.take("b", 1) == (2,)
    assert cores.shared == (3,)
    assert cores.take("c", 2) == ()
    assert cores.give_back("a")
    assert not cores.give_back("a")
    assert cores.shared == (0, 1, 3)


def test_somewhere_to_run_is_always_left():
    cores = Cores(range(2))
    cores.keep("a", (0, 1))
    assert cores.shared == (0, 1)


def test_the_kernels_lists_are_read():
    assert parse("0-2,5,7-7\n") == (0, 1, 2, 5, 7)
    assert parse("\n") == ()


def _lease(cpu_milli: int, control: bool = False) -> Lease:
    return Lease.model_construct(allocation="a", cpu_milli=cpu_milli, control=control)


def test_whole_cores_are_for_tasks_that_ask_for_whole_ones_and_not_for_run_workers():
    cores = Cores(range(4))
    assert cores.take_for(_lease(500), "half") == ()
    assert cores.take_for(_lease(0), "none") == ()
    assert cores.take_for(_lease(1000, control=True), "worker") == ()
    assert cores.take_for(_lease(2000), "process") == (0, 1)
    assert cores.take_for(_lease(1000), "container") == (2,)
    assert cores.take_for(_lease(2000), "late") == ()
    assert cores.shared == (3,)


def test_every_runtime_is_told_to_leave_the_cores_of_an_owner():
    cores, told = Cores(range(2)), []

    def sharer(name: str):
        async def share() -> None:
            told.append((name, cores.shared))

        return share

    cores.sharers += [sharer("process"), sharer("docker")]
    cores.take("a", 1)
    asyncio.run(cores.share_the_rest())
    assert told == [("process", (1,)), ("docker", (1,))]
