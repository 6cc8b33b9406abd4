"""When a shape will fit a node: now, after running tasks have reached their time limits, or nobody knows."""

from __future__ import annotations

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
    foretold_end,
)
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
    """For one shape, the time at which each node will have room for it: a column that follows the log."""

    def __init__(self, fits: Fits) -> None:
        self.fits = fits
        self.ready_at: IntArray = np.zeros(0, np.int64)
        self._generation = -1
        self._position = 0

    def refresh(self, snapshot: Snapshot, ledger: Ledger) -> IntArray:
        columns = self.fits.columns
        if self._generation != columns.generation:
            self._generation = columns.generation
            self.ready_at = np.full(len(columns.names), UNKNOWN, np.int64)
            rows = np.arange(len(columns.names))
        else:
            rows = np.array(list(dict.fromkeys(columns.log[self._position :])), np.int64)
        self._position = len(columns.log)
        self.ready_at[rows] = UNKNOWN
        foretold: list[int] = rows[columns.limited[rows] > 0].tolist()
        for row in foretold:
            self.ready_at[row] = ready_at(snapshot, self.fits, row, ledger)
        return self.ready_at


def ready_at(snapshot: Snapshot, fits: Fits, row: int, ledger: Ledger) -> int:
    """0 when the shape fits the row now, the foretold time at which it will, or `UNKNOWN`."""
    columns = fits.columns
    if not fits.profile_ok[columns.profile[row]]:
        return UNKNOWN
    fits.refresh()
    if fits.score[row] > NEVER:
        return 0
    taken = ledger.taken.get(row, ())
    if not columns.limited[row]:
        return UNKNOWN
    room = Room(fits, row)
    ends: list[tuple[int, str, Taken | None]] = []
    for allocation in snapshot.by_node.get(columns.names[row], {}).values():
        end = foretold_end(snapshot, allocation)
        if end is not None:
            ends.append((end, allocation.id, None))
    ends += [(one.ends_ms, f"new-{index}", one) for index, one in enumerate(taken) if one.ends_ms is not None]
    for end, allocation_id, one in sorted(ends, key=lambda item: item[:2]):
        if one is None:
            room.release(snapshot, allocation_id)
        else:
            room.release_taken(one)
        if room.fits():
            return max(1, end)
    return UNKNOWN
