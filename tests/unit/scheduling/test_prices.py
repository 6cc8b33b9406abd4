"""Free room has the price of what the expected mix would make of it, and tasks go where they take least of that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from builders import a_node, a_snapshot, a_spec, a_task, commit

from crater_core.model.node import Node, SharingMode
from crater_core.model.prices import MICRO, Make
from crater_core.model.resources import GpuRequest, Request, TypicalRequest
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import schedule
from crater_core.scheduling.prices import price_table
from crater_core.simulation import Arrival, Trace, fill

TIME_SLICE = SharingMode.TIME_SLICE


def whole(weight: int, count: int = 1, types: tuple[str, ...] = ()) -> TypicalRequest:
    return TypicalRequest(Request(1000, gpu=GpuRequest(count, types=types)), weight)


def share(milli: int, weight: int, memory_mib: int = 0) -> TypicalRequest:
    return TypicalRequest(Request(500, gpu=GpuRequest(1, milli, memory_mib, exclusive=False)), weight)


def nodes(count: int = 4, gpus: int = 4, **more: Any) -> list[Node]:
    return [a_node(f"n{i:02d}", cpu=64, gpus=gpus, sharing=more.pop("sharing", TIME_SLICE), **more) for i in range(count)]


def worth(workload: list[TypicalRequest], *free_milli: int, of: list[Node] | None = None) -> list[float]:
    """Of a device with so much free, in devices."""
    of = of or nodes()
    table = price_table(of, tuple(workload))
    assert table is not None
    return [table.makes[Make.of(of[0])].room_micro[free] / MICRO for free in free_milli]


def test_room_that_nobody_could_use_is_worth_nothing() -> None:
    assert worth([whole(50), share(800, 50)], 0, 200, 799) == [0, 0, 0]


def test_a_device_is_worth_what_the_last_task_to_get_one_earns() -> None:
    """Whole devices are all served, shares of 0.8 get what is left over: one more device would serve one more share."""
    assert worth([whole(50), share(800, 50)], 800, 1000) == [0.8, 0.8]


def test_a_rest_is_worth_the_shares_that_fit_into_it() -> None:
    """Three of 0.3 fill 0.9 of a device, so that each is worth a third of the device that one more would otherwise open."""
    assert worth([share(300, 100)], 299, 300, 600, 1000) == pytest.approx([0, 0.3, 0.6, 0.9])


def test_a_share_by_memory_takes_what_its_memory_takes() -> None:
    assert worth([share(0, 100, memory_mib=24_576)], 590, 600, 1000) == pytest.approx([0, 0.5, 0.5])


def test_whole_devices_have_a_price_where_none_can_be_shared() -> None:
    exclusive = nodes(sharing=SharingMode.EXCLUSIVE)
    assert worth([whole(10), share(500, 10)], 500, of=exclusive) == [0]


def test_only_the_type_that_is_asked_for_too_much_has_a_price() -> None:
    scarce = [*nodes(1, gpu_type="t4", model="T4"), a_node("a", cpu=64, gpus=12, sharing=TIME_SLICE)]
    table = price_table(scarce, (whole(50, types=("t4",)), whole(50)))
    assert table is not None
    assert {make.gpu_type: round(prices.room_micro[1000] / MICRO) for make, prices in table.makes.items()} == {"t4": 1, "a100": 0}


def test_the_order_of_nodes_changes_no_price() -> None:
    some = [*nodes(3), *nodes(2, gpu_type="t4", model="T4", gpus=2)]
    workload = (whole(10), whole(3, 2), share(810, 6), share(470, 5), share(190, 2))
    assert price_table(some[::-1], workload) == price_table(some, workload)


@pytest.mark.parametrize("workload", [(), (TypicalRequest(Request(1000), 5),)])
def test_without_gpus_or_requests_for_them_there_are_no_prices(workload: tuple[TypicalRequest, ...]) -> None:
    assert price_table(nodes(), workload) is None
    assert price_table([a_node()], (whole(1),)) is None


def priced(some: list[Node], *workload: TypicalRequest) -> Snapshot:
    snapshot = a_snapshot(some, settings=Settings(strategy="fragmentation_aware"))
    snapshot.prices = price_table(some, workload)
    return snapshot


def test_where_no_node_can_run_what_is_asked_for_there_are_no_prices() -> None:
    assert price_table([a_node(gpus=1, sharing=SharingMode.EXCLUSIVE)], (share(500, 1),)) is None


def test_a_share_takes_the_rest_that_is_worth_least() -> None:
    """Of 0.5 and 0.6 free the first is worth two shares of 0.25, the second no more: 0.1 of it is nobody's, so that a task of
    0.3 that may take either takes it where it destroys one share and not where it leaves the same."""
    some = nodes(1, gpus=2)
    snapshot = priced(some, share(250, 100), share(350, 1))
    for milli in (500, 400):
        snapshot.advance([a_task(f"r{milli}", gpu=milli, cpu=0)])
        commit(snapshot, schedule(snapshot, 0))
    room = {allocation.grants[0].index: 1000 - allocation.held.gpu_milli for allocation in snapshot.allocations.values()}
    snapshot.advance([a_task("new", gpu=350, cpu=0)])
    chosen = schedule(snapshot, 1).placements[0].grants[0].index
    assert room[chosen] == 600, "0.25 is left of it; of the other nothing that fits anybody"


def test_cores_stay_beside_the_devices_that_need_them() -> None:
    """Tasks usually ask for 4 cores with a device. Six of the eight of "a" leave two for its other device."""
    some = [a_node("a", cpu=8, gpus=2), a_node("b", cpu=32, gpus=2)]
    snapshot = priced(some, TypicalRequest(Request(4000, gpu=GpuRequest(1)), 1))
    snapshot.advance([a_task("heavy", gpu=1000, cpu=6000), a_task("light", gpu=1000, cpu=4000, at_ms=1)])
    assert [placement.node for placement in schedule(snapshot, 2).placements] == ["b", "a"]


def test_a_task_without_a_gpu_leaves_the_cores_that_devices_need() -> None:
    some = [a_node("a", cpu=8, gpus=2), a_node("b", cpu=16, gpus=2)]
    snapshot = priced(some, TypicalRequest(Request(4000, gpu=GpuRequest(1)), 1))
    snapshot.advance([a_task("preparation", cpu=6000)])
    assert schedule(snapshot, 0).placements[0].node == "b"


def test_prices_of_another_mix_are_used_from_the_next_decision_on() -> None:
    some = [a_node("a", gpus=1, sharing=TIME_SLICE), a_node("b", gpus=1, gpu_type="t4", model="T4", sharing=TIME_SLICE)]
    snapshot = priced(some, whole(10, types=("a100",)), whole(1))
    snapshot.advance([a_task("new", gpu=1000)])
    assert schedule(snapshot, 0).placements[0].node == "b"
    snapshot.prices = price_table(some, (whole(10, types=("t4",)), whole(1)))
    assert schedule(snapshot, 0).placements[0].node == "a"


def small_trace() -> Trace:
    """Eight nodes of eight devices, and shares as a real cluster's users ask for them."""
    random = np.random.default_rng(1)
    sizes = random.choice([1000, 810, 470, 320, 650, 230, 160], 160, p=[0.2, 0.3, 0.2, 0.1, 0.1, 0.06, 0.04]).tolist()
    arrivals = tuple(Arrival(a_spec(f"t{i}", gpu=milli, cpu=int(random.integers(2, 12)) * 1000)) for i, milli in enumerate(sizes))
    return Trace(
        "small", tuple(a_node(f"n{i:02d}", cpu=96, memory_gib=999, gpus=8, sharing=TIME_SLICE) for i in range(8)), arrivals
    )


def full(trace: Trace, seed: int, prices: bool) -> float:
    """The part of all GPU compute that is given out when about all of it has been asked for."""
    ratios = fill(trace, "fragmentation_aware", seed, 103, prices=prices).ratio_percent
    return float(np.mean([ratio for asked, ratio in ratios.items() if asked >= 98]))


def test_prices_fill_a_cluster_better_than_fragmentation_alone() -> None:
    """Over five seeds, both in this process."""
    trace = small_trace()
    assert np.mean([full(trace, seed, True) - full(trace, seed, False) for seed in range(5)]) >= 0.2
