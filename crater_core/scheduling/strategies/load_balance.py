"""The least loaded node, so that tasks disturb each other least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from crater_core.scheduling.columns import CONTROL_SLOTS, CPU, MEMORY, BoolArray, IntArray

if TYPE_CHECKING:
    from crater_core.scheduling.fits import Fits


class LoadBalance:
    """The free part of CPU, memory and GPU after placing, in thousandths, summed over what the node has."""

    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        columns, gpu = fits.columns, fits.shape.gpu
        if fits.shape.control:
            return columns.free[rows, CONTROL_SLOTS]
        left = columns.free[rows] - fits.need
        total = np.maximum(columns.total[rows], 1)
        score = left[:, CPU] * 1000 // total[:, CPU] + left[:, MEMORY] // np.maximum(total[:, MEMORY] // 1000, 1)
        if gpu is not None:
            gpu_left = columns.compute_free[rows] - gpu.count * gpu.compute_milli
            return 2 * (score + gpu_left * 1000 // np.maximum(columns.gpus[rows], 1))
        return 2 * score + (columns.gpus[rows] == 0)
