"""The node whose free room stays most useful to the tasks that usually come: by prices, then by expected fragmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CONTROL_SLOTS, CPU, BoolArray, IntArray, plain
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
        rows, devices = plain(rows), None if devices is None else devices.T if len(rows) > 1 else devices[0]
        # From here on a column a node and a line a device: whole lines are added up, which is quicker.
        cpu, room = columns.free[:, CPU][rows], columns.compute.T.take(rows, 1)
        full = room == MILLI
        whole: IntArray = np.add.reduce(full, 0, dtype=np.int64)
        device_now, whole_now = mix.tables(rows, cpu)
        device_then, whole_then = mix.tables(rows, cpu - fits.shape.request.cpu_milli)
        at = device_then + room
        each = mix.by_device.take(at)
        fall = np.add.reduce(mix.by_device.take(device_now + room) - each, 0) + mix.by_whole.take(whole_now + whole)
        loss = worth.of_cores(rows, fits.shape.request)
        if gpu is None or devices is None:
            points = squeeze(fall - mix.by_whole.take(whole_then + whole), mix.unit)
            return least_first(loss, 2 * points + (columns.gpus[rows] == 0))
        wanted = mix.wanted[rows]
        spared = SPARE - wanted * SPARE // MILLI
        if worth.priced:
            loss += wanted * (SPARE_MICRO // MILLI)
        if gpu.exclusive:
            fall += gpu.count * mix.by_device.take(device_then + MILLI)
            points = squeeze(fall - mix.by_whole.take(whole_then + whole - gpu.count), mix.unit)
            return least_first(loss + gpu.count * worth.of_whole(rows), 2 * points + spared)
        share = fits.device_compute.take(columns.kind.T.take(rows, 1))
        after = mix.by_device.take(np.where(devices, at - share, 0))
        left = mix.by_whole.take(np.subtract(whole_then + whole, full, dtype=np.int64))
        points = 2 * squeeze(fall + each - after - left, mix.unit) + spared
        lost = worth.of_shares(rows, room, np.where(devices, room - share, 0))
        scores = np.where(devices, least_first(loss + lost, points), -1)
        if gpu.count == 1:
            fits.prefer(rows, scores.argmax(0))
        return scores.max(0)


def squeeze(fall: IntArray, unit: int) -> IntArray:
    """0 to 100, 50 being no change; a fall by one device is 73."""
    score: IntArray = (100 / (1 + np.exp(fall / (-unit * MILLI)))).astype(np.int64)
    return score
