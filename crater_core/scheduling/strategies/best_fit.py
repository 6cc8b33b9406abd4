"""The smallest sufficient place: the node that is left with the least, so that large room stays whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crater_core.scheduling.columns import CONTROL_SLOTS, CPU, BoolArray, IntArray

if TYPE_CHECKING:
    from crater_core.scheduling.fits import Fits


class BestFit:
    """What is left of CPU and GPU after placing, each as a part of the largest node's, in whole per cent.

    Whole per cent on purpose: nodes that differ by less are equal, and the first by name takes the task, so that load
    gathers instead of spreading over equals.
    """

    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        columns = fits.columns
        if fits.shape.control:
            return columns.free[rows, CONTROL_SLOTS]
        gpu = fits.shape.gpu
        cpu_max, gpu_max = columns.largest_cpu, columns.largest_gpu
        cpu_left = columns.free[:, CPU].take(rows) - fits.shape.request.cpu_milli
        gpu_left = columns.compute_free.take(rows) - (gpu.count * gpu.compute_milli if gpu else 0)
        # (1 - half of each fraction left), in whole per cent, without leaving whole numbers.
        left = (cpu_left * gpu_max + gpu_left * cpu_max) * 50
        score = 100 - -(-left // (cpu_max * gpu_max))
        return 2 * score + (columns.gpus.take(rows) == 0) if gpu is None else 2 * score
