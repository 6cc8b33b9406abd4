"""Prices as tables over the columns: what a placement takes from what the free room is worth."""

from __future__ import annotations

import numpy as np

from crater_core.model.prices import PriceTable
from crater_core.model.resources import Request
from crater_core.model.units import GIB, MILLI
from crater_core.scheduling.columns import Columns, IntArray

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
        """What the cores and the memory are worth that a request takes on each of these nodes."""
        make = self._columns.make.take(rows)
        return self._core.take(make) * request.cpu_milli // MILLI + self._gib.take(make) * request.memory_bytes // GIB

    def of_whole(self, rows: IntArray) -> IntArray:
        """What one whole device of each node is worth."""
        return self._room.take(self._columns.make.take(rows) * (MILLI + 1) + MILLI)

    def of_shares(self, rows: IntArray, room: IntArray, left: IntArray) -> IntArray:
        """What it takes from devices of these nodes to go from `room` to `left` thousandths free: a row a node."""
        start = self._columns.make.take(rows)[:, None] * (MILLI + 1)
        return self._room.take(start + room) - self._room.take(start + left)


def least_first(loss_micro: IntArray, score: IntArray) -> IntArray:
    """The smaller loss first, then the higher score."""
    return (STEPS_MAX - np.minimum(loss_micro // QUANTUM_MICRO, STEPS_MAX)) * STEP + score
