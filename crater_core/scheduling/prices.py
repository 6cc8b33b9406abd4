"""Prices of free room from a linear programme: how an expected mix of tasks would best fill the cluster, were tasks divisible.

Makes of nodes, kinds of requests, and the ways to cut a device into shares are its columns. What one more free device, share
or core would add to the best filling is its price. A device is cut as a flow: from all free, through what is left after each
share, so that the programme stays small where the patterns would be thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from crater_core.model.node import GpuDevice, Node
from crater_core.model.prices import MICRO, Make, MakePrices, PriceTable
from crater_core.model.resources import GpuRequest, TypicalRequest
from crater_core.model.units import GIB, MILLI
from crater_core.scheduling.shapes import need_of_device, type_matches
from crater_core.scheduling.worth import asked_milli

GRAIN_MILLI = 10
"""Shares are rounded up to hundredths of a device."""
GRAINS = MILLI // GRAIN_MILLI
MAKES_MAX = 40
"""A bound on the programme's size: the makes with most devices. Nodes of other makes have no prices."""
KINDS_MAX = 200
"""Another: the requests that ask for most."""
SERVE_CORES = 0.01
"""What a request without a GPU earns, in devices: enough to be served before cores are left over."""

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Kind:
    """Requests that a device cannot tell apart; their cores and memory are averages."""

    gpu: GpuRequest | None
    weight: int = 0
    cores: float = 0.0
    gib: float = 0.0

    def add(self, one: TypicalRequest) -> None:
        self.weight += one.weight
        part = one.weight / self.weight
        self.cores += part * (one.request.cpu_milli / MILLI - self.cores)
        self.gib += part * (one.request.memory_bytes / GIB - self.gib)

    @property
    def earns(self) -> float:
        """Devices' worth of compute."""
        return asked_milli(self.gpu) / MILLI if self.gpu else SERVE_CORES


def price_table(nodes: Iterable[Node], workload: tuple[TypicalRequest, ...]) -> PriceTable | None:
    """Prices for these nodes when tasks of this mix ask for all of their devices. None when there is nothing to price or the
    solver finds no answer. Takes about a second for a thousand nodes of a dozen makes: not for the inside of a cycle.
    """
    counts = Counter(Make.of(node) for node in nodes)
    order = sorted(counts, key=lambda make: (-make.devices * counts[make], repr(make)))
    makes = [make for make in order if make.devices][:MAKES_MAX]
    kinds = _kinds(workload)
    devices = sum(make.devices * counts[make] for make in makes)
    asked = sum(kind.weight * kind.earns for kind in kinds if kind.gpu is not None)
    if not devices or not asked:
        return None
    programme = _Programme(kinds, [kind.weight * devices / asked for kind in kinds])
    for make in makes:
        programme.add(make, counts[make])
    prices = programme.solve()
    return None if prices is None else PriceTable(workload, dict(zip(makes, prices, strict=True)))


def _kinds(workload: Sequence[TypicalRequest]) -> list[_Kind]:
    found: dict[GpuRequest | None, _Kind] = {}
    for one in workload:
        found.setdefault(one.request.gpu, _Kind(one.request.gpu)).add(one)
    kinds = sorted(found.values(), key=lambda kind: (-kind.weight * kind.earns, repr(kind.gpu)))
    return kinds[:KINDS_MAX]


class _Programme:
    """Maximise what the served requests earn. Rows: demand of each kind; then for each make its cores, memory and whole devices,
    the shares cut of each size, and the devices at each room left.
    """

    def __init__(self, kinds: list[_Kind], demand: list[float]) -> None:
        self._kinds = kinds
        self._bounds: list[float] = list(demand)
        self._entries: list[tuple[int, int, float]] = []
        """Row, column, factor."""
        self._earn: list[float] = []
        self._most: list[float] = []
        self._made: list[tuple[int, list[int]]] = []
        """Of each make, its first row and the sizes of its shares."""

    def add(self, make: Make, count: int) -> None:
        first = len(self._bounds)
        device = GpuDevice("", 0, make.model, make.gpu_type, make.device_memory_mib, "", make.sharing, make.overcommit_milli)
        grains = [_grains(kind.gpu, device) for kind in self._kinds]
        sizes = sorted({size for size in grains if size is not None and 0 < size < GRAINS}, reverse=True)
        self._made.append((first, sizes))
        cores, memory, whole = first, first + 1, first + 2
        cut = {size: first + 3 + place for place, size in enumerate(sizes)}
        self._bounds += [count * make.cpu_milli / MILLI, count * make.memory_bytes / GIB, float(count * make.devices)]
        self._bounds += [0.0] * len(sizes)
        rooms = _rooms(sizes)
        at = {room: len(self._bounds) + place for place, room in enumerate(rooms)}
        at[GRAINS] = whole
        self._bounds += [0.0] * len(rooms)
        for row, (kind, size) in enumerate(zip(self._kinds, grains, strict=True)):
            gpus = kind.gpu.count if kind.gpu else 0
            if size is None or gpus > make.devices or kind.cores * MILLI > make.cpu_milli or kind.gib * GIB > make.memory_bytes:
                continue
            column = self._column(kind.earns, count * (make.devices // gpus) if gpus > 1 else np.inf)
            self._entries += [(row, column, 1.0), (cores, column, kind.cores), (memory, column, kind.gib)]
            if gpus:
                self._entries.append((whole if size == GRAINS else cut[size], column, float(gpus)))
        for room in (GRAINS, *rooms):
            for size in sizes:
                if size <= room:
                    column = self._column(0.0, np.inf)
                    self._entries += [(cut[size], column, -1.0), (at[room], column, 1.0)]
                    if room > size:
                        self._entries.append((at[room - size], column, -1.0))

    def _column(self, earns: float, most: float) -> int:
        self._earn.append(earns)
        self._most.append(most)
        return len(self._earn) - 1

    def solve(self) -> list[MakePrices] | None:
        if not self._entries:  # No node can run any of it.
            return None
        rows, columns, factors = (np.array(part) for part in zip(*self._entries, strict=True))
        worth = _worth_of_rows((factors, (rows, columns)), self._bounds, np.array(self._earn), np.array(self._most))
        return None if worth is None else [_prices(worth[first:], sizes) for first, sizes in self._made]


def _worth_of_rows(entries: object, bounds: Sequence[float], earn: Floats, most: Floats) -> Floats | None:
    """By how much the best filling would rise, were the bound of each row one higher."""
    # The solver takes longer to import than to run, and most processes that import this module never need it.
    from scipy import optimize, sparse

    matrix = sparse.coo_array(entries, shape=(len(bounds), len(earn))).tocsr()
    limits = np.column_stack([np.zeros(len(most)), most])
    solve = cast(Any, optimize.linprog)  # Its types are not known.
    result = solve(-earn, A_ub=matrix, b_ub=bounds, bounds=limits, method="highs-ipm")
    return -result.ineqlin.marginals if result.status == 0 else None


def _grains(gpu: GpuRequest | None, device: GpuDevice) -> int | None:
    """How much of one device a request takes; 0 for none, None where it cannot run."""
    if gpu is None:
        return 0
    need = need_of_device(gpu, device) if type_matches(gpu.types, device) else None
    if need is None:
        return None
    compute, memory = need
    if gpu.exclusive:
        return GRAINS
    if device.allocatable_memory_mib:
        compute = max(compute, -(-memory * MILLI // device.allocatable_memory_mib))
    return min(GRAINS, -(-compute // GRAIN_MILLI))


def _rooms(sizes: list[int]) -> list[int]:
    """What can be left of a device after shares of these sizes, but for all and nothing."""
    found, look = {GRAINS}, [GRAINS]
    while look:
        room = look.pop()
        for size in sizes:
            if size < room and room - size not in found:
                found.add(room - size)
                look.append(room - size)
    return sorted(found - {GRAINS}, reverse=True)


def _prices(worth: Floats, sizes: list[int]) -> MakePrices:
    """A room is worth the dearest shares that it can be cut into; all of a device at least what a whole device is worth."""
    core, gib, whole = (float(one) for one in worth[:3])
    share = worth[3 : 3 + len(sizes)].tolist()
    room = [0.0] * (GRAINS + 1)
    for free in range(1, GRAINS + 1):
        cuts = (room[free - size] + price for size, price in zip(sizes, share, strict=True) if size <= free)
        room[free] = max(room[free - 1], *cuts, 0.0)
    room[GRAINS] = max(room[GRAINS], whole)
    micro = np.rint(np.array(room) * MICRO).astype(np.int64)
    return MakePrices(
        tuple(micro[np.arange(MILLI + 1) // GRAIN_MILLI].tolist()), max(0, round(core * MICRO)), max(0, round(gib * MICRO))
    )
