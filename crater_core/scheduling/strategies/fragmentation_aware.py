"""The node whose free GPU room stays most useful to the tasks that usually come: fragmentation gradient descent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CONTROL_SLOTS, CPU, BoolArray, IntArray

if TYPE_CHECKING:
    from crater_core.scheduling.fits import Fits


class FragmentationAware:
    """The fall of the node's expected fragmentation, squeezed into 0 to 100.

    Whole scores and a fixed order among equals are part of the method: exact scores spread tasks over equal nodes and eat
    the idle ones. A share goes to the device where the fall is largest.
    """

    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        columns, mix, gpu = fits.columns, fits.mix, fits.shape.gpu
        if fits.shape.control:
            return columns.free[rows, CONTROL_SLOTS]
        mix.refresh()
        cpu, now = columns.free[rows, CPU] - fits.shape.request.cpu_milli, mix.node[rows]
        room = mix.devices(rows)
        if devices is None or gpu is None:
            return 2 * squeeze(now - mix.of(rows, cpu, room), mix.unit) + (columns.gpus[rows] == 0)
        if gpu.exclusive or gpu.count > 1:
            taken = devices & (np.add.accumulate(devices, 1) <= gpu.count)
            share = fits.device_compute[columns.kind[rows]]
            return 2 * squeeze(now - mix.of(rows, cpu, np.where(taken, room - share, room)), mix.unit)
        at, slot = np.nonzero(devices & _first_of_equals(room, devices))
        after = room[at]
        after[np.arange(len(at)), slot] -= fits.device_compute[columns.kind[rows[at], slot]]
        fall = np.full(devices.shape, -1, np.int64)
        fall[at, slot] = squeeze(now[at] - mix.of(rows[at], cpu[at], after), mix.unit)
        best = fall.argmax(1)
        fits.prefer(rows, best)
        return 2 * fall[np.arange(len(rows)), best]


def squeeze(fall: IntArray, unit: int) -> IntArray:
    """0 to 100, 50 being no change; a fall by one device is 73."""
    return (100 / (1 + np.exp(-fall / (unit * MILLI)))).astype(np.int64)


def _first_of_equals(room: IntArray, devices: BoolArray) -> BoolArray:
    """Devices with as much free as an earlier one of the node give the same score: one of them will do."""
    value = np.where(devices, room, -1)
    same = value[:, :, None] == value[:, None, :]
    return same.argmax(2) == np.arange(room.shape[1])
