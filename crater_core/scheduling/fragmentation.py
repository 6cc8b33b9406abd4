"""How much of a node's free GPU room a typical task could not use: the measure of Weng et al., "Beware of Fragmentation"
(USENIX ATC 2023), in whole numbers.

For one typical request, the fragmented part of a node is the sum of the devices too small for it, or all that is free when
the node cannot run it (too few cores, too few devices, wrong type). The node's fragmentation is the mean over the workload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from crater_core.model.node import GpuDevice
from crater_core.model.prices import PriceTable
from crater_core.model.resources import GpuRequest, Request, TypicalRequest
from crater_core.model.task import TaskSpec, TaskType
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CPU, Columns, IntArray
from crater_core.scheduling.shapes import type_matches
from crater_core.scheduling.worth import Worth

POPULAR_PERCENT = 95
"""The most frequent requests are kept until they make up this much of the workload."""


def count_workload(specs: Iterable[TaskSpec]) -> tuple[TypicalRequest, ...]:
    """Every request that some tasks make, most frequent first: what prices are worked out from."""
    counts = Counter(spec.request for spec in specs if spec.type is not TaskType.CONTROL)
    return tuple(TypicalRequest(request, n) for request, n in sorted(counts.items(), key=lambda item: (-item[1], repr(item[0]))))


def learn_workload(specs: Iterable[TaskSpec]) -> tuple[TypicalRequest, ...]:
    """The requests that make up most of some tasks, most frequent first: a value for `Settings.workload`."""
    return popular(count_workload(specs))


def popular(workload: Sequence[TypicalRequest]) -> tuple[TypicalRequest, ...]:
    """Of requests with the most frequent first, those that make up most of them."""
    bound, taken = sum(one.weight for one in workload) * POPULAR_PERCENT, 0
    for index, one in enumerate(workload):
        if taken * 100 >= bound:
            return tuple(workload[:index])
        taken += one.weight
    return tuple(workload)


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
    """The workload as tables, from which the fragmentation of a node is a sum over its devices and one correction.

    A table holds, for the kind of node and the number of free cores, what one device with so much free adds to the
    fragmentation: all of it for requests that it is too small for or that the cores are too few for. `by_whole` adds, by how
    many devices are wholly free, what requests for more whole devices than that cannot use. A request for shares of
    several devices counts as one for a single share.
    """

    def __init__(self, columns: Columns, workload: tuple[TypicalRequest, ...], prices: PriceTable | None = None) -> None:
        self.columns = columns
        self.worth = Worth(columns, prices)
        self._workload = popular(prices.workload) if prices else workload
        self._typical: tuple[TypicalRequest, ...] = ()
        self._kinds = 0
        self._widths: int = 1
        """One more than the devices of the largest node."""
        self._declarations = -1
        self._accepts: list[tuple[bool, ...]] = []
        """By device kind, which of the typical requests may run on it."""
        self.unit = 1
        """This much is one thousandth of a device."""
        self.by_device: IntArray = np.zeros(0, np.int64)
        self.by_whole: IntArray = np.zeros(0, np.int64)
        self._first: IntArray = np.zeros(0, np.int64)
        """By row, the kind of its first device, which stands for the node: its devices are of one type."""
        self._table: IntArray = np.zeros(0, np.int64)
        self._device_start: IntArray = np.zeros(0, np.int64)
        self._whole_start: IntArray = np.zeros(0, np.int64)
        self._wanted_of_kind: IntArray = np.zeros(1, np.int64)
        self.wanted: IntArray = np.zeros(0, np.int64)
        """By row, in thousandths of the most wanted type: how much is asked of its type by requests that name one."""

    def refresh(self) -> None:
        """Take in what nodes have declared since. When that changes the tables, all scores are void."""
        columns = self.columns
        if self._declarations == columns.declarations:
            return
        self._declarations = columns.declarations
        self._first = columns.kind[:, 0].copy()
        self.worth.refresh()
        typical = self._workload or general_workload(columns)
        now: tuple[tuple[TypicalRequest, ...], int, int] = (typical, len(columns.kinds), columns.compute.shape[1] + 1)
        if now != (self._typical, self._kinds, self._widths):
            self._typical, self._kinds, self._widths = now
            self._build(typical)
            columns.void()
        wanted = self._wanted(typical)
        if not np.array_equal(wanted, self._wanted_of_kind):
            self._wanted_of_kind = wanted
            columns.void()
        self.wanted = wanted.take(self._first)
        self._table = self._class.take(self._first) * (len(self._cores) + 1)

    def tables(self, rows: IntArray, cpu: IntArray) -> tuple[IntArray, IntArray]:
        """Where the tables of these nodes start, with so many cores free: in `by_device`, and in `by_whole`."""
        table: IntArray = self._table[rows] + self._cores.searchsorted(cpu, "right")
        return self._device_start[table], self._whole_start[table]

    def _build(self, typical: tuple[TypicalRequest, ...]) -> None:
        """Kinds of devices that the same requests accept share their tables; the last are those of no device: nothing."""
        self.unit = max(1, sum(one.weight for one in typical))
        self._cores = np.array(sorted({one.request.cpu_milli for one in typical}), np.int64)
        accepts = self._accepts = [tuple(_accepts(one, kind.device) for one in typical) for kind in self.columns.kinds]
        classes = {pattern: index for index, pattern in enumerate(dict.fromkeys(accepts))}
        self._class = np.array([classes[pattern] for pattern in accepts] + [len(classes)], np.int64)
        by_device = np.zeros((len(classes) + 1, len(self._cores) + 1, MILLI + 1), np.int64)
        by_whole = np.zeros((len(classes) + 1, len(self._cores) + 1, self._widths), np.int64)
        free, whole = np.arange(MILLI + 1), np.arange(self._widths)
        for pattern, index in classes.items():
            for one, accepted in zip(typical, pattern, strict=True):
                gpu = one.request.gpu
                if gpu is None or not accepted:
                    by_device[index] += one.weight * free
                    continue
                enough = int(self._cores.searchsorted(one.request.cpu_milli, "left")) + 1
                by_device[index, :enough] += one.weight * free
                by_device[index, enough:] += one.weight * np.where(free < _size(gpu), free, 0)
                if gpu.exclusive:
                    by_whole[index, enough:] += one.weight * np.where(whole < gpu.count, whole * MILLI, 0)
        self.by_device, self.by_whole = by_device.ravel(), by_whole.ravel()
        tables = np.arange((len(classes) + 1) * (len(self._cores) + 1))
        self._device_start, self._whole_start = tables * (MILLI + 1), tables * self._widths

    def _wanted(self, typical: tuple[TypicalRequest, ...]) -> IntArray:
        """Requests that name types fall on the devices they accept, in proportion to how many there are of each."""
        accepts = self._accepts
        devices = np.bincount(self.columns.kind[self.columns.kind >= 0].ravel(), minlength=len(accepts)).tolist()
        asked = [0] * len(accepts)
        for index, one in enumerate(typical):
            gpu = one.request.gpu
            if gpu is not None and gpu.types:
                there = sum(count for count, accepted in zip(devices, accepts, strict=True) if accepted[index])
                for kind, accepted in enumerate(accepts):
                    if accepted[index] and there:
                        asked[kind] += one.weight * gpu.count * _size(gpu) * MILLI // there
        most = max(asked, default=0)
        return np.array([amount * MILLI // most if most else 0 for amount in asked] + [0], np.int64)


def _accepts(one: TypicalRequest, device: GpuDevice) -> bool:
    return one.request.gpu is not None and type_matches(one.request.gpu.types, device)


def _size(gpu: GpuRequest) -> int:
    """Compute of one share; one by memory alone counts as half a device."""
    return MILLI if gpu.exclusive else gpu.compute_milli or MILLI // 2
