"""How many tasks of an array may run at one time."""

from __future__ import annotations

from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Array


def array_full(snapshot: Snapshot, array: Array, just_placed: int = 0) -> Reason | None:
    """Set when the array runs as many as it may, with those that this cycle has placed."""
    running = len(snapshot.placed_of_array.get(array.id, ())) + just_placed
    if array.running_max is None or running < array.running_max:
        return None
    return Reason.of(ReasonCode.ARRAY_LIMIT, running=running, limit=array.running_max)
