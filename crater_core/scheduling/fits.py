"""For one shape, which nodes fit and how they score: a column that is refreshed only for nodes that changed."""

from __future__ import annotations

import numpy as np

from crater_core.model.node import Node
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import (
    CONTROL_MEMORY,
    CONTROL_SLOTS,
    CPU,
    DISK,
    MEMORY,
    NOBODY,
    PORTS,
    WIDTH,
    BoolArray,
    Columns,
    IntArray,
    pick,
)
from crater_core.scheduling.fragmentation import Mix
from crater_core.scheduling.quotas import held_of
from crater_core.scheduling.shapes import Shape, need_of_device, pool_allows, type_matches
from crater_core.scheduling.strategies import Strategy

NEVER = -(1 << 50)
"""The score of a node that does not fit."""
TOO_MUCH = 1 << 60
"""More than any device has: the need of a device that the shape may not use."""


class Fits:
    """The needs of one shape in the units of the columns, and its score for each node."""

    def __init__(self, columns: Columns, shape: Shape, strategy: Strategy, mix: Mix) -> None:
        self.columns = columns
        self.mix = mix
        self.shape = shape
        self.strategy = strategy
        self.count = shape.gpu.count if shape.gpu else 0
        self.wanted = held_of(shape.request.amounts)
        self.need: IntArray = _need(shape)
        self.needs = [(column, need) for column, need in enumerate(self.need.tolist()) if need > 0]
        """Columns of which something is needed. (A node that has less than nothing of another is no worse a place.)"""
        self.profile_ok: BoolArray = np.zeros(1, np.bool_)
        self.device_needs: list[tuple[int, int]] = [(TOO_MUCH, TOO_MUCH)]
        """By device kind, compute in thousandths and memory in MiB of one share; the columns below hold the same."""
        self._device_needs: IntArray = np.full((2, 1), TOO_MUCH, np.int64)
        self.device_compute, self.device_memory = self._device_needs
        self.user = columns.user_id(shape.user) if shape.user is not None else NOBODY
        self.score: IntArray = np.zeros(0, np.int64)
        self.preferred: IntArray | None = None
        """For a share: the device that the strategy chose on each node, where it has a view on that."""
        self._generation = -1
        self._declarations = -1
        self._moment = 0

    def prefer(self, rows: IntArray, slots: IntArray) -> None:
        """A strategy says which device of each row it scored."""
        if self.preferred is None or len(self.preferred) != len(self.score):
            self.preferred = np.full(len(self.score), -1, np.int64)
        self.preferred[rows] = slots

    def best(self) -> int:
        """The row of the best node, the first by name among equals; -1 when none fits."""
        self.refresh()
        if not len(self.score):
            return -1
        row = int(self.score.argmax())
        return row if self.score[row] > NEVER else -1

    def refresh(self) -> None:
        columns = self.columns
        if self._generation != columns.generation:
            self._learn()
            self.score = np.full(len(columns.names), NEVER, np.int64)
            self._update(np.arange(len(columns.names)))
            self._generation = columns.generation
        elif self._moment < columns.moment:
            if self._declarations != columns.declarations:
                self._learn()
            self._update(columns.changed_since(self._moment))
        self._moment = columns.moment

    def fitting_devices(self, rows: IntArray) -> BoolArray:
        """For each row, which of its devices could give one share."""
        fit = self.devices_with_room(rows)
        if self.shape.user is not None and self.columns.mps:
            user = pick(self.columns.user, rows)
            fit &= (user == NOBODY) | (user == self.user)
        return fit

    def devices_with_room(self, rows: IntArray) -> BoolArray:
        """As `fitting_devices`, whoever uses them. (Only MPS devices have a user: see `Columns.user`.)"""
        columns = self.columns
        enough: BoolArray = columns.room.take(rows, 2) >= self._device_needs.take(columns.kind.T.take(rows, 1), 1)
        return (enough[0] & enough[1]).T

    def least_compute(self) -> IntArray:
        """For each row, the compute in thousandths of a card that one device counts where it counts least."""
        rows = np.arange(len(self.score))
        parts = np.array([*(kind.device.card_milli for kind in self.columns.kinds), MILLI], np.int64)
        allowed = self.device_compute < TOO_MUCH
        counts = np.where(allowed, np.where(allowed, self.device_compute, 0) * parts // MILLI, TOO_MUCH)
        taken = counts[self.columns.kind]
        return np.where(self.fitting_devices(rows), taken, TOO_MUCH).min(1, initial=TOO_MUCH)

    def _update(self, rows: IntArray) -> None:
        columns = self.columns
        self.score[rows] = NEVER
        ok = self.profile_ok[columns.profile[rows]]
        for column, need in self.needs:
            ok &= columns.free[:, column][rows] >= need
        rows = rows[ok]
        fit: BoolArray | None = None
        if self.count and len(rows):
            fit = self.fitting_devices(rows)
            enough: BoolArray = np.logical_or.reduce(fit, 1) if self.count == 1 else np.add.reduce(fit, 1) >= self.count
            fit, rows = pick(fit, enough.nonzero()[0]), rows[enough]
        if len(rows):
            self.score[rows] = self.strategy.score(self, rows, fit)

    def _learn(self) -> None:
        """Take in profiles and device kinds seen since. The last place is for -1: no device, or a node that takes nothing."""
        columns, shape = self.columns, self.shape
        self._declarations = columns.declarations
        if len(self.profile_ok) != len(columns.profiles) + 1:
            self.profile_ok = np.array([profile_fits(shape, node) for node in columns.profiles] + [False], np.bool_)
        if len(self.device_compute) != len(columns.kinds) + 1:
            needs = [self._need_of_kind(index) for index in range(len(columns.kinds))]
            self.device_needs = [*needs, (TOO_MUCH, TOO_MUCH)]
            self._device_needs = np.array(self.device_needs, np.int64).T.copy()
            self.device_compute, self.device_memory = self._device_needs

    def _need_of_kind(self, index: int) -> tuple[int, int]:
        kind, gpu = self.columns.kinds[index], self.shape.gpu
        if gpu is None or not type_matches(gpu.types, kind.device) or not pool_allows(self.shape, kind.pools, kind.device):
            return TOO_MUCH, TOO_MUCH
        return need_of_device(gpu, kind.device) or (TOO_MUCH, TOO_MUCH)


def _need(shape: Shape) -> IntArray:
    need = np.zeros(WIDTH, np.int64)
    request = shape.request
    need[PORTS] = request.ports
    if shape.control:
        need[CONTROL_SLOTS], need[CONTROL_MEMORY] = 1, request.memory_bytes
    else:
        need[CPU], need[MEMORY], need[DISK] = request.cpu_milli, request.memory_bytes, request.disk_bytes
    return need


def profile_fits(shape: Shape, node: Node) -> bool:
    """Labels, pools and runtime: what of a node does not change with its load."""
    return (
        shape.runtime in node.runtimes
        and all(pool in node.pools for pool in shape.pools)
        and all(node.labels.get(key) == value for key, value in shape.labels)
    )
