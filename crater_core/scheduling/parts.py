"""Where the room of an advance reservation is: the nodes that it takes when it is made, and others when those close."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from crater_core.model.node import Node
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.reservation import Reservation, ReservedPart
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Snapshot
from crater_core.model.units import MILLI
from crater_core.scheduling.endings import foretold_end
from crater_core.scheduling.quotas import applicable, limits_of
from crater_core.scheduling.shapes import given_whole


def find_parts(snapshot: Snapshot, wanted: Reservation) -> tuple[ReservedPart, ...] | Reason:
    """Nodes that can give the amounts in that time, those that will be empty first; or why there are not enough.

    A node gives what it has in all, less what other reservations of that time take: what runs there now is not asked to end
    before the reservation begins.
    """
    refusal = _larger_than_quota(snapshot, wanted)
    return refusal if refusal is not None else _find(snapshot, wanted, snapshot.reservations.values())


def moved_reservations(snapshot: Snapshot, now_ms: int) -> tuple[Reservation, ...]:
    """Reservations of which a part is on a node that is gone, lost or takes nothing new, with that part elsewhere, as far as
    there is room for it elsewhere. Other parts stay where they are.
    """
    known, moved = dict(snapshot.reservations), list[Reservation]()
    for name, reservation in sorted(snapshot.reservations.items()):
        if reservation.to_ms > now_ms and any(not _is_open(snapshot, part) for part in reservation.parts):
            known[name] = replace(reservation, parts=_elsewhere(snapshot, reservation, known, now_ms))
            if known[name].parts != reservation.parts:
                moved.append(known[name])
    return tuple(moved)


def _is_open(snapshot: Snapshot, part: ReservedPart) -> bool:
    node = snapshot.nodes.get(part.node)
    return node is not None and node.schedulable


def _elsewhere(
    snapshot: Snapshot, reservation: Reservation, known: Mapping[str, Reservation], now_ms: int
) -> tuple[ReservedPart, ...]:
    """Its parts, each of those on closed nodes replaced by others where some can be found."""
    from_ms, parts = max(now_ms, reservation.from_ms), reservation.parts
    others = [one for name, one in known.items() if name != reservation.name]
    for part in reservation.parts:
        if _is_open(snapshot, part):
            continue
        stay = replace(reservation, name="", parts=tuple(one for one in parts if one is not part))
        amounts = {"gpus": part.gpus, "cpu_milli": part.cpu_milli, "memory_bytes": part.memory_bytes}
        found = _find(snapshot, replace(reservation, from_ms=from_ms, **amounts), [*others, stay])
        if not isinstance(found, Reason):
            parts = _joined((*stay.parts, *found))
    return parts


def _joined(parts: Iterable[ReservedPart]) -> tuple[ReservedPart, ...]:
    """One part a node."""
    sums: dict[str, ReservedPart] = {}
    for part in parts:
        had = sums.get(part.node, ReservedPart(part.node))
        sums[part.node] = ReservedPart(
            part.node, had.gpus + part.gpus, had.cpu_milli + part.cpu_milli, had.memory_bytes + part.memory_bytes
        )
    return tuple(sums.values())


def _find(snapshot: Snapshot, wanted: Reservation, others: Iterable[Reservation]) -> tuple[ReservedPart, ...] | Reason:
    taken: dict[str, list[ReservedPart]] = defaultdict(list)
    for other in others:
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
    each = GpuRequest(1, types=wanted.gpu_types).least_milli
    asked = (("gpu", each * wanted.gpus), ("cpu", wanted.cpu_milli), ("memory", wanted.memory_bytes))
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
    well = sum(device.healthy and given_whole(wanted.gpu_types, device) for device in node.devices)
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
