"""When a shape will fit a node: now, after running tasks have ended, or nobody knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from crater_core.model.snapshot import Snapshot
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import (
    CONTROL_MEMORY,
    CONTROL_SLOTS,
    CPU,
    DISK,
    MEMORY,
    NOBODY,
    PORTS,
    IntArray,
)
from crater_core.scheduling.endings import Ending, foretold_end
from crater_core.scheduling.fits import NEVER, Fits
from crater_core.scheduling.ledger import Ledger, Taken

UNKNOWN = 1 << 60
"""Later than any time: no end can be foretold that would make room."""


class Room:
    """One node's free room as plain numbers, from which what runs there can be taken off in turn."""

    def __init__(self, fits: Fits, row: int) -> None:
        columns = fits.columns
        self._fits = fits
        self.free: list[int] = columns.free[row].tolist()
        self.compute: list[int] = columns.compute[row].tolist()
        self.memory: list[int] = columns.gpu_memory[row].tolist()
        self.user: list[int] = columns.user[row].tolist()
        self._kinds: list[int] = columns.kind[row].tolist()
        self._needs: list[int] = fits.need.tolist()
        self._slots = {device.uuid: slot for slot, device in enumerate(columns.devices[row])}

    def fits(self) -> bool:
        fits = self._fits
        if any(need > 0 and free < need for free, need in zip(self.free, self._needs, strict=True)):
            return False
        return self.devices_that_fit() >= fits.count

    def devices_that_fit(self) -> int:
        fits = self._fits
        if not fits.count:
            return 0
        return sum(
            compute >= fits.device_needs[kind][0]
            and memory >= fits.device_needs[kind][1]
            and (fits.shape.user is None or user in (NOBODY, fits.user))
            for kind, compute, memory, user in zip(self._kinds, self.compute, self.memory, self.user, strict=True)
        )

    def copies(self, most: int) -> int:
        """How many copies of the shape fit at once, counted up to `most`."""
        if most == 1:
            return int(self.fits())
        needs = [(free, need) for free, need in zip(self.free, self._needs, strict=True) if need > 0]
        copies = min([most, *(max(0, free) // need for free, need in needs)])
        count = self._fits.count
        if not count:
            return copies
        shares = [self._shares_of(slot, most) for slot in range(len(self._kinds))]
        while copies and sum(min(share, copies) for share in shares) < copies * count:
            copies -= 1
        return copies

    def _shares_of(self, slot: int, most: int) -> int:
        """How many copies one device could serve."""
        fits, (compute, memory) = self._fits, self._fits.device_needs[self._kinds[slot]]
        if fits.shape.user is not None and self.user[slot] not in (NOBODY, fits.user):
            return 0
        return min(most, max(0, self.compute[slot]) // compute, max(0, self.memory[slot]) // memory if memory else most)

    def release(self, snapshot: Snapshot, allocation_id: str) -> None:
        """The room of a running allocation, back."""
        allocation = snapshot.allocations[allocation_id]
        held = allocation.held
        self.free[PORTS] += len(allocation.ports)
        if allocation.control:
            self.free[CONTROL_SLOTS] += 1
            self.free[CONTROL_MEMORY] += held.memory_bytes
            return
        self.free[CPU] += held.cpu_milli
        self.free[MEMORY] += held.memory_bytes
        self.free[DISK] += held.disk_bytes
        for grant in allocation.grants:
            self._give_device(self._slots.get(grant.uuid), grant.compute_milli, grant.memory_mib)

    def release_taken(self, taken: Taken) -> None:
        """The room of a placement of this cycle, back."""
        for place, need in enumerate(taken.fits.need.tolist()):
            self.free[place] += need
        for slot, grant in taken.devices:
            self._give_device(slot, grant.compute_milli, grant.memory_mib)

    def _give_device(self, slot: int | None, compute: int, memory: int) -> None:
        if slot is None or self._kinds[slot] < 0:
            return
        self.compute[slot] += compute
        self.memory[slot] += memory
        if self.compute[slot] >= MILLI:
            self.user[slot] = NOBODY


class Forecast:
    """For one shape, the time at which each node will have room for it: a column that follows the log, and the clock where
    something has outlived its forecast.
    """

    def __init__(self, fits: Fits, sure_only: bool = False) -> None:
        self.fits = fits
        self.sure_only = sure_only
        self.ready_at: IntArray = np.zeros(0, np.int64)
        self._stale_at: IntArray = np.zeros(0, np.int64)
        """When the row is to be looked at again though nothing happens on it."""
        self._generation = -1
        self._moment = 0
        self._now_ms = 0

    def refresh(self, snapshot: Snapshot, ledger: Ledger, now_ms: int) -> IntArray:
        columns = self.fits.columns
        if self._generation != columns.generation or now_ms < self._now_ms:
            self._generation = columns.generation
            self.ready_at = np.full(len(columns.names), UNKNOWN, np.int64)
            self._stale_at = np.full(len(columns.names), UNKNOWN, np.int64)
            rows = np.arange(len(columns.names))
        else:
            rows = np.union1d(columns.changed_since(self._moment), np.flatnonzero(self._stale_at <= now_ms))
        self._moment, self._now_ms = columns.moment, now_ms
        self.ready_at[rows] = self._stale_at[rows] = UNKNOWN
        foretold: list[int] = rows[columns.limited[rows] > 0].tolist()
        for row in foretold:
            self.ready_at[row], self._stale_at[row] = ready_at(snapshot, self.fits, row, ledger, now_ms, self.sure_only)
        return self.ready_at


def ready_at(
    snapshot: Snapshot, fits: Fits, row: int, ledger: Ledger, now_ms: int, sure_only: bool = False, copies: int = 1
) -> tuple[int, int]:
    """0 when the shape fits the row now, the foretold time at which it will, or `UNKNOWN`; and when that answer may change
    though nothing happens: at the first end that was foretold and not declared. With `copies`, when so many fit at once.
    """
    columns = fits.columns
    if copies > 1:
        steps = copies_by_time(snapshot, fits, row, ledger, now_ms, copies, sure_only)
        return next((at_ms for at_ms, count in steps if count >= copies), UNKNOWN), UNKNOWN
    if not fits.profile_ok[columns.profile[row]]:
        return UNKNOWN, UNKNOWN
    fits.refresh()
    if fits.score[row] > NEVER:
        return 0, UNKNOWN
    if not columns.limited[row]:
        return UNKNOWN, UNKNOWN
    room, stale_at = Room(fits, row), UNKNOWN
    for ending, allocation_id, taken in _ends(snapshot, columns.names[row], ledger.taken.get(row, ()), now_ms, sure_only):
        if not ending.sure:
            stale_at = min(stale_at, ending.at_ms)
        if taken is None:
            room.release(snapshot, allocation_id)
        else:
            room.release_taken(taken)
        if room.fits():
            return max(1, ending.at_ms), stale_at
    return UNKNOWN, stale_at


def copies_by_time(
    snapshot: Snapshot, fits: Fits, row: int, ledger: Ledger, now_ms: int, most: int, sure_only: bool = False
) -> list[tuple[int, int]]:
    """Times at which more copies of the shape fit the row at once than before, 0 being now, and how many then: up to `most`."""
    columns = fits.columns
    if not fits.profile_ok[columns.profile[row]]:
        return []
    room = Room(fits, row)
    steps = [(0, room.copies(most))]
    for ending, allocation_id, taken in _ends(snapshot, columns.names[row], ledger.taken.get(row, ()), now_ms, sure_only):
        if steps[-1][1] >= most:
            break
        if taken is None:
            room.release(snapshot, allocation_id)
        else:
            room.release_taken(taken)
        count = room.copies(most)
        if count > steps[-1][1]:
            steps.append((max(1, ending.at_ms), count))
    return steps


def _ends(
    snapshot: Snapshot, node: str, taken: Sequence[Taken], now_ms: int, sure_only: bool
) -> list[tuple[Ending, str, Taken | None]]:
    """What will end on a node, first things first: allocations by id, and what was taken in this cycle."""
    ends: list[tuple[Ending, str, Taken | None]] = []
    for allocation in snapshot.by_node.get(node, {}).values():
        ending = foretold_end(snapshot, allocation, now_ms)
        if ending is not None and (ending.sure or not sure_only):
            ends.append((ending, allocation.id, None))
    for index, one in enumerate(taken):
        if one.ending is not None and (one.ending.sure or not sure_only):
            ends.append((one.ending, f"new-{index}", one))
    return sorted(ends, key=lambda item: item[:2])
