"""Carries what allocations begin and end in some changes into the averages of their projects."""

from __future__ import annotations

from collections.abc import Iterable

from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.past import PastUse
from crater_core.model.snapshot import Entity, Snapshot


def averages_moved(snapshot: Snapshot, puts: Iterable[Entity], now_ms: int) -> Changes:
    """The averages of the projects whose holding changes with these entities. Control tasks hold nothing of a share."""
    half_life_ms = snapshot.settings.fair_share_half_life_ms
    last = {put.id: put for put in puts if isinstance(put, Allocation) and not put.control} if half_life_ms else {}
    moved: dict[str, list[float]] = {}
    for allocation in last.values():
        begins = allocation.id not in snapshot.allocations
        if begins is allocation.status.ended:
            continue  # Goes on, or began and ended within one change.
        project, held = snapshot.tasks[allocation.task].spec.project, allocation.held
        lag = moved.get(project)
        if lag is None:
            known = snapshot.past.get(project)
            lag = moved[project] = list(known.lag_at(now_ms, half_life_ms)) if known else [0.0, 0.0, 0.0, 0.0]
        sign = -1 if begins else 1
        for place, amount in enumerate((held.gpu_milli, held.cpu_milli, held.memory_bytes, held.disk_bytes)):
            lag[place] += sign * amount
    return Changes(tuple(PastUse(name, now_ms, (lag[0], lag[1], lag[2], lag[3])) for name, lag in sorted(moved.items())))
