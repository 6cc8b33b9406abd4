"""Prices as tables over the columns: what a placement takes from what the free room is worth."""

from __future__ import annotations

import numpy as np

from crater_core.model.prices import MICRO, PriceTable
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.units import GIB, MILLI
from crater_core.scheduling.columns import CPU, Columns, IntArray

QUANTUM_BITS = 14
"""Losses are told apart by sixtieths of a device; what is finer than that is left to the score they are added to."""
STEPS = 1 << 20
"""More than the loss of any node can be."""
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
        self._plenty = True
        """Cores and memory are worth nothing anywhere, as is usual: devices run out first."""
        self._start: IntArray = np.zeros(0, np.int64)
        """By row, where the prices of its make start in `_room`."""

    def refresh(self) -> None:
        """Take in what nodes have declared since."""
        makes = self._columns.makes
        self._start = self._columns.make * (MILLI + 1)
        if len(makes) == len(self._core):
            return
        known = [self._prices.makes.get(make) if self._prices else None for make in makes]
        nothing = (0,) * (MILLI + 1)
        self._room = np.array([found.room_micro if found else nothing for found in known], np.int64).ravel()
        self._core = np.array([found.core_micro if found else 0 for found in known], np.int64)
        self._gib = np.array([found.gib_micro if found else 0 for found in known], np.int64)
        self._plenty = not (self._core.any() or self._gib.any())

    def of_cores(self, rows: IntArray, request: Request) -> IntArray:
        """What the cores and the memory are worth that a request takes on each of these nodes, and the devices it strands."""
        lost = self._stranded(rows, request)
        if not self._plenty:
            make = self._columns.make[rows]
            lost += self._core.take(make) * request.cpu_milli // MILLI + self._gib.take(make) * request.memory_bytes // GIB
        return lost

    def _stranded(self, rows: IntArray, request: Request) -> IntArray:
        """By how much devices grow for which a node's free cores are too few, if each takes as many as it usually does.

        The programme adds up the cores of all nodes of a make, and so does not see that those of one node run out first.
        """
        if not self._cores_milli:
            return np.zeros_like(rows)
        # In devices times cores: positive where the devices are more.
        over = self._columns.compute_free[rows] * self._cores_milli
        over -= self._columns.free[:, CPU][rows] * MILLI
        more = request.cpu_milli * MILLI - asked_milli(request.gpu) * self._cores_milli
        lost: IntArray = np.maximum(over + more, 0) - np.maximum(over, 0)
        return lost * (MICRO // MILLI) // self._cores_milli

    def of_whole(self, rows: IntArray) -> IntArray:
        """What one whole device of each node is worth."""
        return self._room.take(self._start[rows] + MILLI)

    def of_shares(self, rows: IntArray, room: IntArray, left: IntArray) -> IntArray:
        """What it takes from devices of these nodes to go from `room` to `left` thousandths free: a column a node."""
        start = self._start[rows]
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
    return (STEPS - (loss_micro >> QUANTUM_BITS)) * STEP + score
