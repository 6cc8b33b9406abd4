"""Room that is kept: for a blocked task until it can start, and for one whose victims are being stopped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling.capacity import copies_on_empty
from crater_core.scheduling.columns import IntArray
from crater_core.scheduling.endings import Ending
from crater_core.scheduling.fits import NEVER, TOO_MUCH, Fits
from crater_core.scheduling.forecast import UNKNOWN, copies_by_time, ready_at
from crater_core.scheduling.ledger import Ledger
from crater_core.scheduling.memory import Memory
from crater_core.scheduling.reserving import Reserved

ROWS_MAX = 200
"""How many nodes more than it has members are looked at for a gang, those that will be ready first."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Nobody else may take room on the row, unless `fits` still fits there at `until_ms`; what counts for that are ends that
    were foretold, or with `sure_only` those alone that were declared.
    """

    holder: str
    fits: Fits | None = None
    until_ms: int = UNKNOWN
    sure_only: bool = False
    copies: int = 1
    """So many at once."""


class Keeping:
    """Rows that are kept in this cycle, and for whom."""

    def __init__(self, snapshot: Snapshot, memory: Memory, ledger: Ledger, reserved: Reserved, now_ms: int) -> None:
        self._reserved = reserved
        self._snapshot = snapshot
        self._memory = memory
        self._ledger = ledger
        self._now_ms = now_ms
        self.rows: dict[int, Keep] = {}
        self.reservations = 0

    def keep(self, row: int, holder: str) -> None:
        """Until the holder has been placed."""
        self.rows.setdefault(row, Keep(holder))

    def keep_all(self, rows: Iterable[int], holder: str) -> None:
        for row in rows:
            self.keep(row, holder)

    def release(self, holder: str) -> None:
        self.rows = {row: keep for row, keep in self.rows.items() if keep.holder != holder}

    def barred(self, project: str) -> set[int]:
        """Rows that no task of the project may have emptied for it: kept, or reserved by others."""
        return {*self.rows, *self._reserved.rows_of_others(project)} if self._reserved.rows else set(self.rows)

    def reserve(self, fits: Fits, task: str, project: str, members: int, waited_ms: int) -> None:
        """Keep room for a blocked task.

        The node on which it can start first (for a gang, the nodes on which it can start together), when that can be foretold:
        others may use it if they are gone by then. Once it has
        waited for `hold_after_ms`, only declared ends count, of what runs and of what would pass, so that a wrong forecast can
        put it off no longer. Where those foretell nothing, it gets the node whose youngest task is the oldest: nothing new
        starts there, so the choice stays until it is empty, and the task starts at the latest when those that ran there at
        that time have ended.
        """
        settings = self._snapshot.settings
        if self.reservations >= settings.reservations_max:
            return
        held_long = waited_ms >= settings.hold_after_ms
        if members == 1:
            ready = self._memory.forecast(fits, held_long).refresh(self._snapshot, self._ledger, self._now_ms).copy()
            ready[list(self.barred(project))] = UNKNOWN
            row = int(ready.argmin()) if len(ready) else 0
            if len(ready) and ready[row] < UNKNOWN:
                self.rows[row] = Keep(task, fits, int(ready[row]), held_long)
                self.reservations += 1
                return
        elif self._reserve_together(fits, task, project, members, held_long):
            self.reservations += 1
            return
        if held_long:
            self.reservations += self._hold(fits, task, project, members)

    def _reserve_together(self, fits: Fits, task: str, project: str, members: int, sure_only: bool) -> bool:
        """The nodes on which all members can first start together, each kept for as many as it takes there."""
        ready = self._memory.forecast(fits, sure_only).refresh(self._snapshot, self._ledger, self._now_ms).copy()
        fits.refresh()
        ready[fits.score > NEVER] = 0  # Where nothing ends, nothing was foretold.
        ready[list(self.barred(project))] = UNKNOWN
        order: IntArray = np.argsort(ready, kind="stable")
        most = 1 if fits.shape.alone else members
        # With one member on each there is room on the first `members` nodes: nothing later needs to be looked at.
        latest = int(ready[order[members - 1]]) if len(order) >= members else UNKNOWN
        steps: list[tuple[int, int, int]] = []
        for row in order[: ROWS_MAX + members].tolist():
            if ready[row] > latest or ready[row] >= UNKNOWN:
                break
            times = copies_by_time(self._snapshot, fits, row, self._ledger, self._now_ms, most, sure_only)
            steps += [(at_ms, row, count) for at_ms, count in times if count]
        copies: dict[int, int] = {}
        for at_ms, row, count in sorted(steps):
            copies[row] = count
            if sum(copies.values()) >= members:
                self._keep_copies(copies, fits, task, members, at_ms, sure_only)
                return True
        return False

    def _keep_copies(self, copies: dict[int, int], fits: Fits, task: str, members: int, at_ms: int, sure_only: bool) -> None:
        """Nodes that take most of them first, so that few are kept."""
        for row, count in sorted(copies.items(), key=lambda one: (-one[1], one[0])):
            if members > 0:
                self.rows[row] = Keep(task, fits, at_ms, sure_only, min(count, members))
                members -= count

    def _hold(self, fits: Fits, task: str, project: str, members: int) -> bool:
        """Enough nodes for all members, were they empty."""
        barred = self.barred(project)
        held: list[int] = []
        copies = 0
        for row in self._oldest_first(fits):
            if row in barred:
                continue
            here = copies_on_empty(fits.shape, fits.columns.nodes[row])
            if here:
                held.append(row)
                copies += here
            if copies >= members:
                self.rows.update({row: Keep(task) for row in held})
                return True
        return False

    def _oldest_first(self, fits: Fits) -> list[int]:
        columns = fits.columns
        eligible: IntArray = np.flatnonzero(fits.profile_ok[columns.profile])
        if fits.count:
            eligible = eligible[(fits.device_compute[columns.kind[eligible]] < TOO_MUCH).sum(1) >= fits.count]
        rows: list[int] = eligible[np.argsort(columns.newest[eligible], kind="stable")].tolist()
        return rows

    def why_barred(self, fits: Fits, row: int, task: str, project: str, ending: Ending | None) -> Reason | None:
        """What keeps the task off this row, on which it fits; None when it may have it."""
        if fits.shape.control:
            return None
        reserved = self._reserved.why_barred(fits, row, project, ending) if row in self._reserved.rows else None
        keep = self.rows.get(row)
        if reserved is not None or keep is None or keep.holder == task:
            return reserved
        held = Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder=keep.holder)
        if keep.fits is None:
            return held
        if ending is not None and ending.at_ms <= keep.until_ms and (ending.sure or not keep.sure_only):
            return None
        mark = self._ledger.mark()
        self._ledger.take(fits, row, task, 0, ending)
        ready, _ = ready_at(self._snapshot, keep.fits, row, self._ledger, self._now_ms, keep.sure_only, keep.copies)
        self._ledger.rollback(mark)
        return None if ready <= keep.until_ms else held
