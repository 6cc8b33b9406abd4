"""Where the data are, then where the caller likes to be, then where the load is least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from crater_core.scheduling.columns import CONTROL_SLOTS, BoolArray, IntArray
from crater_core.scheduling.strategies.load_balance import LoadBalance

if TYPE_CHECKING:
    from crater_core.scheduling.fits import Fits

STEPS = 64
"""A difference of less than one part in so many is none: then the next wish decides."""


class Affinity:
    """Bytes that need not travel come first, as a part of all; then preferred labels; then what `load_balance` says."""

    _by_load = LoadBalance()

    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        if fits.shape.control:
            return fits.columns.free[rows, CONTROL_SLOTS]
        load = self._by_load.score(fits, rows, devices)
        return (_local(fits, rows) * (STEPS + 1) + _liked(fits, rows)) * LOAD_RANGE + np.minimum(load, LOAD_RANGE - 1)


LOAD_RANGE = 8_192
"""More than the highest score of `load_balance`."""


def _local(fits: Fits, rows: IntArray) -> IntArray:
    found = np.zeros(len(rows), np.int64)
    total = sum(count for _, count in fits.shape.data)
    for node, count in fits.shape.data:
        row = fits.columns.row_of.get(node)
        if row is not None and total:
            found[rows == row] = count * STEPS // total
    return found


def _liked(fits: Fits, rows: IntArray) -> IntArray:
    wishes = fits.shape.prefer
    if not wishes:
        return np.zeros(len(rows), np.int64)
    met = [sum(profile.labels.get(key) == value for key, value in wishes) for profile in fits.columns.profiles]
    liked: IntArray = np.array(met, np.int64).take(fits.columns.profile.take(rows)) * STEPS // len(wishes)
    return liked
