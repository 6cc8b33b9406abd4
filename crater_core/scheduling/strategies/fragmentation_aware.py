"""The node whose free room stays most useful to the tasks that usually come: by prices, then by expected fragmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CONTROL_SLOTS, CPU, BoolArray, IntArray
from crater_core.scheduling.worth import least_first

if TYPE_CHECKING:
    from crater_core.scheduling.fits import Fits

SPARE = 40
"""How many points the most wanted type of GPU costs a task; a whole device's fall of fragmentation is about as many."""

SPARE_MICRO = 900_000
"""The same in the unit of prices."""


class FragmentationAware:
    """First the node whose free room loses least of its worth, where there are prices. Among equals, and without prices, the
    fall of the node's expected fragmentation, squeezed into 0 to 100.

    Whole scores and a fixed order among equals are part of the method: exact scores spread tasks over equal nodes and eat
    the idle ones. A share goes to the device where both say. Types of GPU that other tasks name are spared, in proportion to
    how much is asked of them: who can run anywhere leaves them to those who cannot.
    """

    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        columns, mix, gpu, worth = fits.columns, fits.mix, fits.shape.gpu, fits.mix.worth
        if fits.shape.control:
            return columns.free[rows, CONTROL_SLOTS]
        cpu, room = columns.free[:, CPU].take(rows), columns.compute.take(rows, 0)
        full = room == MILLI
        whole: IntArray = np.add.reduce(full, 1, dtype=np.int64)
        device_now, whole_now = mix.tables(rows, cpu)
        device_then, whole_then = mix.tables(rows, cpu - fits.shape.request.cpu_milli)
        now = np.add.reduce(mix.by_device.take(device_now[:, None] + room), 1) + mix.by_whole.take(whole_now + whole)
        at = device_then[:, None] + room
        each = mix.by_device.take(at)
        then = np.add.reduce(each, 1)
        loss = worth.of_cores(rows, fits.shape.request)
        if gpu is None or devices is None:
            fall = squeeze(now - then - mix.by_whole.take(whole_then + whole), mix.unit)
            return least_first(loss, 2 * fall + (columns.gpus.take(rows) == 0))
        wanted = mix.wanted.take(rows)
        spared = SPARE - wanted * SPARE // MILLI
        if worth.priced:
            loss += wanted * (SPARE_MICRO // MILLI)
        if gpu.exclusive:
            then -= gpu.count * mix.by_device.take(device_then + MILLI)
            fall = squeeze(now - then - mix.by_whole.take(whole_then + whole - gpu.count), mix.unit)
            return least_first(loss + gpu.count * worth.of_whole(rows), 2 * fall + spared)
        share = fits.device_compute.take(columns.kind.take(rows, 0))
        after = mix.by_device.take(np.where(devices, at - share, 0))
        whole_left: IntArray = np.subtract((whole_then + whole)[:, None], full, dtype=np.int64)
        left = mix.by_whole.take(whole_left)
        falls = 2 * squeeze((now - then)[:, None] + each - after - left, mix.unit) + spared[:, None]
        lost = worth.of_shares(rows, room, np.where(devices, room - share, 0))
        falls = np.where(devices, least_first(loss[:, None] + lost, falls), -1)
        best = falls.argmax(1)
        if gpu.count == 1:
            fits.prefer(rows, best)
        return falls.max(1)


def squeeze(fall: IntArray, unit: int) -> IntArray:
    """0 to 100, 50 being no change; a fall by one device is 73."""
    score: IntArray = (100 / (1 + np.exp(fall / (-unit * MILLI)))).astype(np.int64)
    return score
