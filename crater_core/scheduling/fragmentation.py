"""How much of a node's free GPU room a typical task could not use: the measure of Weng et al., "Beware of Fragmentation"
(USENIX ATC 2023), in whole numbers.

For one typical request, the fragmented part of a node is the sum of the devices too small for it, or all that is free when
the node cannot run it (too few cores, too few devices, wrong type). The node's fragmentation is the mean over the workload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from crater_core.model.resources import GpuRequest, Request, TypicalRequest
from crater_core.model.task import TaskSpec, TaskType
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CPU, Columns, IntArray
from crater_core.scheduling.shapes import type_matches

POPULAR_PERCENT = 95
"""The most frequent requests are kept until they make up this much of the workload."""


def learn_workload(specs: Iterable[TaskSpec]) -> tuple[TypicalRequest, ...]:
    """The requests that make up most of some tasks, most frequent first: a value for `Settings.workload`."""
    counts = Counter(spec.request for spec in specs if spec.type is not TaskType.CONTROL)
    bound, taken = counts.total() * POPULAR_PERCENT, 0
    typical: list[TypicalRequest] = []
    for request, count in sorted(counts.items(), key=lambda item: (-item[1], repr(item[0]))):
        if taken * 100 >= bound:
            break
        typical.append(TypicalRequest(request, count))
        taken += count
    return tuple(typical)


def general_workload(columns: Columns) -> tuple[TypicalRequest, ...]:
    """Without knowledge of the tasks: mostly single devices, some shares, some of two, four and eight."""
    devices = int(columns.gpus.sum()) // MILLI
    cores = int(columns.total[columns.gpus > 0, CPU].sum()) // devices // 2 if devices else 0
    whole = [TypicalRequest(Request(cores * count, gpu=GpuRequest(count)), weight) for count, weight in _WHOLE]
    shares = [
        TypicalRequest(Request(cores * milli // MILLI, gpu=GpuRequest(1, milli, exclusive=False)), weight)
        for milli, weight in _SHARES
    ]
    return (*whole, *shares)


_WHOLE = ((1, 40), (2, 10), (4, 8), (8, 8))
_SHARES = ((500, 17), (250, 17))


class Mix:
    """The workload as tables, and the fragmentation of every node as a column that follows the log."""

    def __init__(self, columns: Columns, workload: tuple[TypicalRequest, ...]) -> None:
        self.columns = columns
        self._workload = workload
        self._generation = -1
        self._position = 0
        self._kinds = -1
        self.node: IntArray = np.zeros(0, np.int64)
        """Fragmentation of each node now, in `unit`s."""
        self.unit = 1
        """This much is one thousandth of a device."""

    def refresh(self) -> None:
        columns = self.columns
        if self._generation != columns.generation or self._kinds != len(columns.kinds):
            self._build()
            rows = np.arange(len(columns.names))
            self.node = np.zeros(len(rows), np.int64)
            self._generation, self._kinds = columns.generation, len(columns.kinds)
        elif self._position < len(columns.log):
            rows = np.array(list(dict.fromkeys(columns.log[self._position :])), np.int64)
        else:
            return
        self._position = len(columns.log)
        self.node[rows] = self.of(rows, columns.free[rows, CPU], self.devices(rows))

    def devices(self, rows: IntArray) -> IntArray:
        """Free compute of each device, nothing for unwell ones."""
        return np.where(self.columns.kind[rows] >= 0, self.columns.compute[rows], 0)

    def of(self, rows: IntArray, cpu: IntArray, devices: IntArray) -> IntArray:
        """Fragmentation of states: free cores and free compute of each device, as they would be on `rows`."""
        kind = self._type_of_row(rows)
        rank = self._rank[devices]
        count = np.add.reduce(rank[:, None, :] > self._index[None, :, None], 2, dtype=np.int64)
        ordered = -np.sort(-devices, 1)
        room = np.zeros((len(rows), devices.shape[1] + 1), np.int64)
        np.add.accumulate(ordered, 1, out=room[:, 1:])
        large_enough = np.take_along_axis(room, count, 1)
        level = np.searchsorted(self._cores, cpu, side="right")
        hopeless = self._by_cores[kind, level]
        unsatisfied = np.where(count < self._needed, self._by_cores[kind, 0], hopeless)
        too_small = np.add.reduce(self._small[kind[:, None], devices], 1)
        return too_small + np.add.reduce(unsatisfied * large_enough, 1) + self._never[kind] * room[:, -1]

    def _type_of_row(self, rows: IntArray) -> IntArray:
        """The kind of a node's first device stands for the node: its devices are of one type."""
        return self.columns.kind[rows, 0] if self.columns.kind.shape[1] else np.full(len(rows), -1, np.int64)

    def _build(self) -> None:
        typical = self._workload or general_workload(self.columns)
        groups: dict[tuple[int, int], list[TypicalRequest]] = {}
        for one in typical:
            gpu = one.request.gpu
            if gpu is not None:
                groups.setdefault((_size(gpu), gpu.count), []).append(one)
        sizes = sorted({size for size, _ in groups})
        keys = sorted(groups)
        self.unit = max(1, sum(one.weight for one in typical))
        self._index = np.array([sizes.index(size) for size, _ in keys], np.int8)
        self._needed = np.array([count for _, count in keys], np.int64)
        self._rank = np.searchsorted(sizes, np.arange(MILLI + 1), side="right").astype(np.int8)
        self._cores = np.array(sorted({one.request.cpu_milli for one in typical}), np.int64)
        kinds = len(self.columns.kinds)
        # Tables by device kind; the last row is for nodes without devices, where nothing can be fragmented.
        self._by_cores = np.zeros((kinds + 1, len(self._cores) + 1, len(keys)), np.int64)
        self._small = np.zeros((kinds + 1, MILLI + 1), np.int64)
        self._never = np.zeros(kinds + 1, np.int64)
        for index, kind in enumerate(self.columns.kinds):
            for one in typical:
                gpu = one.request.gpu
                if gpu is None or not type_matches(gpu.types, kind.device):
                    self._never[index] += one.weight
                    continue
                size = _size(gpu)
                # Unsatisfied for want of cores at every level below what it asks for; level 0 is "no cores at all".
                short = np.searchsorted(self._cores, one.request.cpu_milli, side="left") + 1
                self._by_cores[index, :short, keys.index((size, gpu.count))] += one.weight
                self._small[index, :size] += one.weight * np.arange(size)


def _size(gpu: GpuRequest) -> int:
    """Compute of one share; one by memory alone counts as half a device."""
    return MILLI if gpu.exclusive else gpu.compute_milli or MILLI // 2
