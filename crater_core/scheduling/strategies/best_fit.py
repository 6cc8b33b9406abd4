"""The smallest sufficient place: the node that is left with the least, so that large room stays whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crater_core.scheduling.columns import CONTROL_SLOTS, CPU, BoolArray, IntArray, plain

if TYPE_CHECKING:
    from crater_core.scheduling.fits import Fits


class BestFit:
    """What is left of CPU and GPU after placing, each as a part of the largest node's, in whole per cent.

    Whole per cent on purpose: nodes that differ by less are equal, and the first by name takes the task, so that load
    gathers instead of spreading over equals.
    """

    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        columns, request, rows = fits.columns, fits.shape.request, plain(rows)
        if fits.shape.control:
            return columns.free[rows, CONTROL_SLOTS]
        gpu, cpu_max, gpu_max = request.gpu, columns.largest_cpu, columns.largest_gpu
        taken = request.cpu_milli * gpu_max + (gpu.count * gpu.compute_milli if gpu else 0) * cpu_max
        # 100 - half of each fraction left, rounded down, without leaving whole numbers: all of it times both maxima first.
        score = columns.free[:, CPU][rows] * (-50 * gpu_max)
        score -= columns.compute_free[rows] * (50 * cpu_max)
        score += 100 * cpu_max * gpu_max + 50 * taken
        score //= cpu_max * gpu_max
        score *= 2
        return score + (columns.gpus[rows] == 0) if gpu is None else score
