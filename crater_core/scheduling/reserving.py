"""Advance reservations: which nodes they take when they are made, and whom they keep off those nodes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from crater_core.model.node import Node
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
from crater_core.scheduling.quotas import applicable, limits_of
from crater_core.scheduling.shapes import type_matches

# --- making one


def find_parts(snapshot: Snapshot, wanted: Reservation) -> tuple[ReservedPart, ...] | Reason:
    """Nodes that can give the amounts in that time, those that will be empty first; or why there are not enough.

    A node gives what it has in all, less what other reservations of that time take: what runs there now is not asked to end
    before the reservation begins.
    """
    refusal = _larger_than_quota(snapshot, wanted)
    if refusal is not None:
        return refusal
    taken: dict[str, list[ReservedPart]] = defaultdict(list)
    for other in snapshot.reservations.values():
        if other.name != wanted.name and other.overlaps(wanted):
            for part in other.parts:
                taken[part.node].append(part)
    offers = [_offer(node, wanted, taken[name]) for name, node in sorted(snapshot.nodes.items())]
    offers = [offer for offer in offers if offer is not None]
    offers.sort(key=lambda one: (_stays(snapshot, one.node, wanted), -one.gpus, -one.cpu_milli, one.node))
    parts: list[ReservedPart] = []
    gpus, cpu, memory = wanted.gpus, wanted.cpu_milli, wanted.memory_bytes
    for offer in offers:
        part = _part(offer, wanted, gpus, cpu, memory)
        if part is not None:
            parts.append(part)
            gpus, cpu, memory = gpus - part.gpus, cpu - part.cpu_milli, memory - part.memory_bytes
    for resource, asked, missing, reserved in (
        ("gpu", MILLI * wanted.gpus, MILLI * gpus, MILLI * sum(part.gpus for parts in taken.values() for part in parts)),
        ("cpu", wanted.cpu_milli, cpu, sum(part.cpu_milli for parts in taken.values() for part in parts)),
        ("memory", wanted.memory_bytes, memory, sum(part.memory_bytes for parts in taken.values() for part in parts)),
    ):
        if missing > 0:
            facts = {"resource": resource, "wanted": asked, "largest": asked - missing, "kept": reserved}
            return Reason(ReasonCode.CANNOT_RESERVE, facts)
    return tuple(parts)


def _larger_than_quota(snapshot: Snapshot, wanted: Reservation) -> Reason | None:
    asked = (("gpu", MILLI * wanted.gpus), ("cpu", wanted.cpu_milli), ("memory", wanted.memory_bytes))
    for policy in applicable(snapshot.policies, wanted.project, None):
        for (resource, amount), limit in zip(asked, limits_of(policy.limits), strict=False):
            if limit is not None and amount > limit:
                facts = {"policy": policy.name, "resource": resource, "wanted": amount, "limit": limit}
                return Reason(ReasonCode.LARGER_THAN_QUOTA, facts)
    return None


def _offer(node: Node, wanted: Reservation, taken: list[ReservedPart]) -> ReservedPart | None:
    """What the node could give at most."""
    if not node.schedulable or any(node.labels.get(key) != value for key, value in wanted.node_labels.items()):
        return None
    well = sum(device.healthy and type_matches(wanted.gpu_types, device) for device in node.devices)
    return ReservedPart(
        node.name,
        max(0, well - sum(part.gpus for part in taken)),
        max(0, node.allocatable.cpu_milli - sum(part.cpu_milli for part in taken)),
        max(0, node.allocatable.memory_bytes - sum(part.memory_bytes for part in taken)),
    )


def _part(offer: ReservedPart, wanted: Reservation, gpus: int, cpu: int, memory: int) -> ReservedPart | None:
    """Cores and memory go with the GPUs; without GPUs, memory goes with the cores."""
    units, offered, whole = (gpus, offer.gpus, wanted.gpus) if wanted.gpus else (cpu, offer.cpu_milli, wanted.cpu_milli)
    if not wanted.gpus and not wanted.cpu_milli:
        units, offered, whole = memory, offer.memory_bytes, wanted.memory_bytes
    units = min(units, offered)
    for total, available in ((wanted.cpu_milli, offer.cpu_milli), (wanted.memory_bytes, offer.memory_bytes)):
        if total:
            units = min(units, available * whole // total)
    if units <= 0:
        return None
    share = [min(left, -(-total * units // whole)) for total, left in ((wanted.cpu_milli, cpu), (wanted.memory_bytes, memory))]
    return ReservedPart(
        offer.node, units if wanted.gpus else 0, min(share[0], offer.cpu_milli), min(share[1], offer.memory_bytes)
    )


def _stays(snapshot: Snapshot, node: str, wanted: Reservation) -> int:
    """How many allocations of others may still be there when it begins."""
    count = 0
    for allocation in snapshot.by_node.get(node, {}).values():
        ending = foretold_end(snapshot, allocation)
        other = snapshot.tasks[allocation.task].spec.project != wanted.project
        count += not allocation.control and other and (ending is None or ending.at_ms > wanted.from_ms)
    return count


# --- keeping others off


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
            mine = [slot for slot in free if slot < len(devices) and type_matches(claim.reservation.gpu_types, devices[slot])]
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
