"""When what runs, or is about to run, will have ended: surely, by a declared time limit, or probably, by what its kind took."""

from __future__ import annotations

from typing import NamedTuple

from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.snapshot import Snapshot


class Ending(NamedTuple):
    """`sure` when the agent will see to it: a time limit, or a stop that is under way."""

    at_ms: int
    sure: bool


def foretold_end(snapshot: Snapshot, allocation: Allocation, now_ms: int = 0) -> Ending | None:
    """When an allocation will have ended; 0 when it is being stopped already; None when nobody can tell.

    One that has outlived what was foretold is corrected: it is expected to take twice as long, and twice as long again.
    """
    if allocation.status is AllocationStatus.STOPPING:
        return Ending(0, True)
    task = snapshot.tasks.get(allocation.task)
    if task is None:
        return None
    start = allocation.started_at_ms if allocation.started_at_ms is not None else allocation.assigned_at_ms
    if task.spec.time_limit_ms is not None:
        return Ending(start + task.spec.time_limit_ms, True)
    return foretold_from(start, task.foretold_ms, now_ms)


def foretold_from(start_ms: int, foretold_ms: int | None, now_ms: int) -> Ending | None:
    if not foretold_ms:
        return None
    lasts = foretold_ms
    while start_ms + lasts <= now_ms:
        lasts *= 2
    return Ending(start_ms + lasts, False)


def expected_end(now_ms: int, limit_ms: int | None, foretold_ms: int | None) -> Ending | None:
    """Of a task that would start now."""
    if limit_ms is not None:
        return Ending(now_ms + limit_ms, True)
    return None if foretold_ms is None else Ending(now_ms + foretold_ms, False)
