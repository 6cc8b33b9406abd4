"""Prices as tables over the columns: what a placement takes from what the free room is worth."""

from __future__ import annotations

import numpy as np

from crater_core.model.prices import MICRO, PriceTable
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.units import GIB, MILLI
from crater_core.scheduling.columns import CPU, Columns, IntArray

QUANTUM_MICRO = 20_000
"""Losses are told apart by fiftieths of a device; what is finer than that is left to the score they are added to."""
STEPS_MAX = 1 << 20
STEP = 1 << 9
"""More than any score that losses are added to."""


class Worth:
    """By make of node; the tables grow with the makes that the columns know. What has no price is worth nothing."""

    def __init__(self, columns: Columns, prices: PriceTable | None) -> None:
        self._columns = columns
        self._prices = prices
        self.priced = prices is not None
        self._cores_milli = _cores_of_a_device(prices) if prices else 0
        self._room: IntArray = np.zeros(0, np.int64)
        self._core: IntArray = np.zeros(0, np.int64)
        self._gib: IntArray = np.zeros(0, np.int64)

    def refresh(self) -> None:
        """Take in makes seen since."""
        makes = self._columns.makes
        if len(makes) == len(self._core):
            return
        known = [self._prices.makes.get(make) if self._prices else None for make in makes]
        nothing = (0,) * (MILLI + 1)
        self._room = np.array([found.room_micro if found else nothing for found in known], np.int64).ravel()
        self._core = np.array([found.core_micro if found else 0 for found in known], np.int64)
        self._gib = np.array([found.gib_micro if found else 0 for found in known], np.int64)

    def of_cores(self, rows: IntArray, request: Request) -> IntArray:
        """What the cores and the memory are worth that a request takes on each of these nodes, and the devices it strands."""
        make, taken = self._columns.make.take(rows), asked_milli(request.gpu)
        cores, free = self._columns.free[:, CPU].take(rows), self._columns.compute_free.take(rows)
        stranded = self._stranded(free - taken, cores - request.cpu_milli) - self._stranded(free, cores)
        worth = self._core.take(make) * request.cpu_milli // MILLI + self._gib.take(make) * request.memory_bytes // GIB
        return worth + stranded * (MICRO // MILLI)

    def _stranded(self, free: IntArray, cores: IntArray) -> IntArray:
        """Thousandths of devices for which a node's free cores are too few, if each takes as many as it usually does.

        The programme adds up the cores of all nodes of a make, and so does not see that those of one node run out first.
        """
        if not self._cores_milli:
            return np.zeros(len(free), np.int64)
        return np.maximum(free - cores * MILLI // self._cores_milli, 0)

    def of_whole(self, rows: IntArray) -> IntArray:
        """What one whole device of each node is worth."""
        return self._room.take(self._columns.make.take(rows) * (MILLI + 1) + MILLI)

    def of_shares(self, rows: IntArray, room: IntArray, left: IntArray) -> IntArray:
        """What it takes from devices of these nodes to go from `room` to `left` thousandths free: a row a node."""
        start = self._columns.make.take(rows)[:, None] * (MILLI + 1)
        return self._room.take(start + room) - self._room.take(start + left)


def asked_milli(gpu: GpuRequest | None) -> int:
    """Thousandths of devices; a share by memory alone counts as half a device."""
    return gpu.count * (gpu.compute_milli or MILLI // 2) if gpu else 0


def _cores_of_a_device(prices: PriceTable) -> int:
    """Thousandths of cores that tasks usually ask for beside a whole device's worth of compute."""
    with_gpus = [(one.weight, one.request) for one in prices.workload if one.request.gpu]
    devices = sum(weight * asked_milli(request.gpu) for weight, request in with_gpus)
    return sum(weight * request.cpu_milli for weight, request in with_gpus) * MILLI // devices if devices else 0


def least_first(loss_micro: IntArray, score: IntArray) -> IntArray:
    """The smaller loss first, then the higher score."""
    return (STEPS_MAX - np.minimum(loss_micro // QUANTUM_MICRO, STEPS_MAX)) * STEP + score
