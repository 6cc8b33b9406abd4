"""Advance reservations: whom they keep off their nodes, before their time and in it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.reservation import Reservation, ReservedPart
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CPU, MEMORY, Columns, IntArray
from crater_core.scheduling.endings import Ending, foretold_end
from crater_core.scheduling.fits import Fits
from crater_core.scheduling.forecast import Room
from crater_core.scheduling.ledger import Ledger
from crater_core.scheduling.shapes import given_whole


@dataclass(frozen=True, slots=True)
class _Claim:
    reservation: Reservation
    part: ReservedPart


class Reserved:
    """The rows that reservations take, in one cycle."""

    def __init__(self, snapshot: Snapshot, columns: Columns, ledger: Ledger, now_ms: int) -> None:
        self._snapshot = snapshot
        self._ledger = ledger
        self._now_ms = now_ms
        self.rows: dict[int, list[_Claim]] = defaultdict(list)
        for _, reservation in sorted(snapshot.reservations.items()):
            for part in reservation.parts if reservation.to_ms > now_ms else ():
                row = columns.row_of.get(part.node)
                if row is not None:
                    self.rows[row].append(_Claim(reservation, part))

    def rows_of_others(self, project: str) -> set[int]:
        return {row for row, claims in self.rows.items() if any(one.reservation.project != project for one in claims)}

    def rows_now_of(self, project: str) -> list[int]:
        """Where the project has room at this time."""
        return sorted(row for row, claims in self.rows.items() if any(self._is_now_of(one, project) for one in claims))

    def name_of(self, project: str) -> str:
        """The reservation by which the project has room at this time."""
        active = [one.reservation.name for claims in self.rows.values() for one in claims if self._is_now_of(one, project)]
        return min(active, default="")

    def _is_now_of(self, claim: _Claim, project: str) -> bool:
        return claim.reservation.project == project and claim.reservation.active(self._now_ms)

    def why_barred(self, fits: Fits, row: int, project: str, ending: Ending | None) -> Reason | None:
        """Why a task of the project may not start on the row, on which it fits: it would take what others have reserved."""
        for claim in self.rows.get(row, ()):
            reservation = claim.reservation
            begins_ms = max(self._now_ms, reservation.from_ms)
            gone = ending is not None and ending.at_ms <= begins_ms
            if reservation.project != project and not gone and not self._left(fits, row, project, ending, begins_ms):
                facts: dict[str, int | str] = {"reservation": reservation.name, "project": reservation.project}
                return Reason(ReasonCode.RESERVED, {**facts, "wait_ms": reservation.to_ms - self._now_ms})
        return None

    def _left(self, fits: Fits, row: int, project: str, ending: Ending | None, at_ms: int) -> bool:
        """Whether, with the task there, the row will have what is reserved for others at that time."""
        mark = self._ledger.mark()
        self._ledger.take(fits, row, "", 0, ending)
        room, name = Room(fits, row), fits.columns.names[row]
        for one in self._ledger.taken.get(row, ()):
            if one.ending is not None and one.ending.at_ms <= at_ms:
                room.release_taken(one)
        self._ledger.rollback(mark)
        for allocation in self._snapshot.by_node.get(name, {}).values():
            ends = foretold_end(self._snapshot, allocation, self._now_ms)
            if ends is not None and ends.at_ms <= at_ms:
                room.release(self._snapshot, allocation.id)
        claims = [one for one in self.rows[row] if one.reservation.project != project and one.reservation.active(at_ms)]
        free = [slot for slot, compute in enumerate(room.compute) if compute >= MILLI]
        for claim in claims:
            held_gpus, held_cpu, held_memory = self._held(name, claim.reservation.project, at_ms)
            devices = fits.columns.devices[row]
            mine = [slot for slot in free if slot < len(devices) and given_whole(claim.reservation.gpu_types, devices[slot])]
            wanted = max(0, claim.part.gpus - held_gpus)
            if len(mine) < wanted:
                return False
            free = [slot for slot in free if slot not in mine[:wanted]]
            room.free[CPU] -= max(0, claim.part.cpu_milli - held_cpu)
            room.free[MEMORY] -= max(0, claim.part.memory_bytes - held_memory)
        return room.free[CPU] >= 0 and room.free[MEMORY] >= 0

    def _held(self, node: str, project: str, at_ms: int) -> tuple[int, int, int]:
        """What the project itself will hold of its part then: whole GPUs, cores, memory."""
        gpus = cpu = memory = 0
        for allocation in self._snapshot.by_node.get(node, {}).values():
            ends = foretold_end(self._snapshot, allocation, self._now_ms)
            mine = self._snapshot.tasks[allocation.task].spec.project == project and not allocation.control
            if mine and (ends is None or ends.at_ms > at_ms):
                gpus += len({grant.uuid for grant in allocation.grants})
                cpu += allocation.held.cpu_milli
                memory += allocation.held.memory_bytes
        return gpus, cpu, memory


@dataclass(frozen=True, slots=True)
class ByReservation:
    """Implements `Right`: whoever else is still there once the project's time has come."""

    project: str
    rows_now: tuple[int, ...]

    def rows(self, columns: Columns) -> IntArray:
        return np.array(self.rows_now, np.int64)

    def covers(self, task: Task) -> bool:
        return task.spec.project != self.project

    def allows(self, tasks: object) -> bool:
        return True
