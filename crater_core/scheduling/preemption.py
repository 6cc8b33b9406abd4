"""Whom to stop so that a more important task fits: the fewest tasks on one node, then those whose stop loses least work."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np

from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskType
from crater_core.scheduling.fits import Fits
from crater_core.scheduling.forecast import Room

ROWS_MAX = 200
"""How many nodes are searched, those with the least important work first."""
SETS_MAX = 2_000
"""How many sets of victims are tried on one node before taking a sufficient one and thinning it."""


@dataclass(frozen=True, slots=True)
class Victims:
    """Tasks to stop on one row. Of a gang every member stops, wherever it runs."""

    row: int
    tasks: tuple[str, ...]
    lost: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    task: str
    here: tuple[str, ...]
    lost: int


def choose_victims(snapshot: Snapshot, fits: Fits, priority: int, now_ms: int, barred: Collection[int]) -> Victims | None:
    """The smallest sufficient set on one node, or None. Taking any one victim out of it would not be enough."""
    columns = fits.columns
    rows = np.flatnonzero(fits.profile_ok[columns.profile] & (columns.lowest < priority))
    rows = rows[np.argsort(columns.lowest[rows], kind="stable")][:ROWS_MAX]
    best: Victims | None = None
    for row in sorted(rows.tolist()):
        if row in barred:
            continue
        found = _on_row(snapshot, fits, row, priority, now_ms)
        if found is not None and (best is None or (len(found.tasks), found.lost) < (len(best.tasks), best.lost)):
            best = found
    return best


def _on_row(snapshot: Snapshot, fits: Fits, row: int, priority: int, now_ms: int) -> Victims | None:
    candidates = _candidates(snapshot, fits.columns.names[row], priority, now_ms)
    if not _enough(snapshot, fits, row, candidates):
        return None
    tried = 0
    for size in range(1, len(candidates) + 1):
        sufficient = [
            chosen
            for chosen in islice(combinations(candidates, size), max(0, SETS_MAX - tried))
            if _enough(snapshot, fits, row, chosen)
        ]
        if sufficient:
            return _victims(row, min(sufficient, key=lambda chosen: (_lost(chosen), [one.task for one in chosen])))
        tried += _sets(len(candidates), size)
        if tried >= SETS_MAX:
            break
    return _victims(row, _thinned(snapshot, fits, row, candidates))


def _candidates(snapshot: Snapshot, node: str, priority: int, now_ms: int) -> list[_Candidate]:
    """Cheapest first."""
    here: dict[str, list[str]] = {}
    for allocation in snapshot.by_node.get(node, {}).values():
        here.setdefault(allocation.task, []).append(allocation.id)
    found: list[_Candidate] = []
    for name, ids in here.items():
        task, allocations = snapshot.tasks[name], list(snapshot.by_task[name].values())
        if _may_be_stopped(snapshot, task, allocations, priority, now_ms):
            found.append(_Candidate(name, tuple(ids), sum(lost_work(allocation, now_ms) for allocation in allocations)))
    return sorted(found, key=lambda one: (one.lost, one.task))


def _may_be_stopped(snapshot: Snapshot, task: Task, allocations: list[Allocation], priority: int, now_ms: int) -> bool:
    settings = snapshot.settings
    return (
        task.spec.priority < priority
        and task.spec.type is not TaskType.CONTROL
        and task.cancel_reason is None
        and task.preemptions < settings.preemptions_max
        and all(
            allocation.status is not AllocationStatus.STOPPING and _ran_ms(allocation, now_ms) >= settings.preempt_min_run_ms
            for allocation in allocations
        )
    )


def _ran_ms(allocation: Allocation, now_ms: int) -> int:
    return now_ms - (allocation.started_at_ms if allocation.started_at_ms is not None else now_ms)


def lost_work(allocation: Allocation, now_ms: int) -> int:
    """What stopping it throws away: time run, times what it holds; a GPU counts as much as ten cores."""
    return _ran_ms(allocation, now_ms) * (10 * allocation.held.gpu_milli + allocation.held.cpu_milli)


def _enough(snapshot: Snapshot, fits: Fits, row: int, chosen: Collection[_Candidate]) -> bool:
    room = Room(fits, row)
    for candidate in chosen:
        for allocation in candidate.here:
            room.release(snapshot, allocation)
    return bool(chosen) and room.fits()


def _thinned(snapshot: Snapshot, fits: Fits, row: int, candidates: list[_Candidate]) -> tuple[_Candidate, ...]:
    """All of them, less every one that is not needed, dearest first."""
    chosen = list(candidates)
    for candidate in reversed(candidates):
        rest = [one for one in chosen if one is not candidate]
        if _enough(snapshot, fits, row, rest):
            chosen = rest
    return tuple(chosen)


def _victims(row: int, chosen: tuple[_Candidate, ...]) -> Victims:
    return Victims(row, tuple(sorted(one.task for one in chosen)), _lost(chosen))


def _lost(chosen: Collection[_Candidate]) -> int:
    return sum(one.lost for one in chosen)


def _sets(count: int, size: int) -> int:
    result = 1
    for i in range(size):
        result = result * (count - i) // (i + 1)
    return result
