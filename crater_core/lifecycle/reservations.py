"""Advance reservations: made, cancelled, and gone when their time is over."""

from __future__ import annotations

from dataclasses import replace

from crater_core.lifecycle.changes import NO_CHANGES, Changes, joined
from crater_core.lifecycle.inputs import ReservationCancelled, ReservationMade, ReservationMoved
from crater_core.model.history import Event
from crater_core.model.reservation import Reservation
from crater_core.model.snapshot import Snapshot


def _event(reservation: Reservation, what: str, now_ms: int, **facts: str | int) -> Event:
    return Event(now_ms, "reservation", reservation.name, what, None, {"project": reservation.project, **facts})


def make(snapshot: Snapshot, asked: ReservationMade, now_ms: int) -> Changes:
    """Whether there is room was looked at before: see `find_parts`."""
    reservation = asked.reservation
    if reservation.name in snapshot.reservations:
        return NO_CHANGES
    facts = {"from_ms": reservation.from_ms, "to_ms": reservation.to_ms, "gpus": reservation.gpus, "by": reservation.by}
    return Changes((reservation,), events=(_event(reservation, "reserved", now_ms, **facts),))


def move(snapshot: Snapshot, asked: ReservationMoved, now_ms: int) -> Changes:
    """Its parts are on other nodes from now on."""
    known, parts = snapshot.reservations.get(asked.reservation.name), asked.reservation.parts
    if known is None or known.parts == parts:
        return NO_CHANGES
    before, after = ({part.node for part in some} for some in (known.parts, parts))
    facts = {"left": ", ".join(sorted(before - after)), "nodes": ", ".join(sorted(after))}
    return Changes((replace(known, parts=parts),), events=(_event(known, "moved", now_ms, **facts),))


def cancel(snapshot: Snapshot, asked: ReservationCancelled, now_ms: int) -> Changes:
    return _gone(snapshot.reservations.get(asked.name), "cancelled", now_ms, by=asked.by)


def expire(snapshot: Snapshot, now_ms: int) -> Changes:
    over = [one for _, one in sorted(snapshot.reservations.items()) if one.to_ms <= now_ms]
    return joined(_gone(one, "expired", now_ms) for one in over)


def _gone(reservation: Reservation | None, what: str, now_ms: int, **facts: str | int) -> Changes:
    if reservation is None:
        return NO_CHANGES
    return Changes(removed=((Reservation, reservation.name),), events=(_event(reservation, what, now_ms, **facts),))
