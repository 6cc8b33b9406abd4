"""Whom to stop so that a task fits: the fewest other tasks, then those whose stop loses least work."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb
from typing import Protocol

import numpy as np

from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskType
from crater_core.scheduling.columns import NOTHING_RUNS, Columns, IntArray
from crater_core.scheduling.fits import NEVER, Fits
from crater_core.scheduling.forecast import Room
from crater_core.scheduling.guarantees import Guarantees

ROWS_MAX = 200
"""How many nodes are searched, those with the least important work first."""
SETS_MAX = 2_000
"""How many sets of victims are tried before taking a sufficient one and thinning it."""


class Right(Protocol):
    """Why a task may stop others, and whom."""

    def rows(self, columns: Columns) -> IntArray:
        """Where it may find somebody to stop."""
        ...

    def covers(self, task: Task) -> bool: ...

    def allows(self, tasks: Collection[str]) -> bool:
        """Whether all of these may be stopped together."""
        ...


@dataclass(frozen=True, slots=True)
class ByPriority:
    """Implements `Right`: whoever is less important, without cutting into what is guaranteed to others."""

    priority: int
    own: tuple[str, ...]
    """Policies of the task that wants the room."""
    guarantees: Guarantees

    def rows(self, columns: Columns) -> IntArray:
        return np.flatnonzero(columns.lowest < self.priority)

    def covers(self, task: Task) -> bool:
        return task.spec.priority < self.priority and self.guarantees.may_give([task.id], self.own, own_too=True)

    def allows(self, tasks: Collection[str]) -> bool:
        return len(tasks) < 2 or self.guarantees.may_give(tasks, self.own, own_too=True)


@dataclass(frozen=True, slots=True)
class ByGuarantee:
    """Implements `Right`: whoever borrows, whatever its priority, for what the policy is guaranteed and had lent."""

    policy: str
    guarantees: Guarantees

    def rows(self, columns: Columns) -> IntArray:
        return np.flatnonzero(columns.lowest < NOTHING_RUNS)

    def covers(self, task: Task) -> bool:
        return self.guarantees.may_give([task.id], (self.policy,), own_too=False)

    def allows(self, tasks: Collection[str]) -> bool:
        return len(tasks) < 2 or self.guarantees.may_give(tasks, (self.policy,), own_too=False)


@dataclass(frozen=True, slots=True)
class Victims:
    """Tasks to stop, and the rows on which the task that they make room for will start. Of a gang every member stops, wherever
    it runs.
    """

    rows: tuple[int, ...]
    tasks: tuple[str, ...]
    lost: int


@dataclass(frozen=True, slots=True)
class _Candidate:
    task: str
    held: Mapping[int, tuple[str, ...]]
    """Its allocations by row."""
    lost: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What room is wanted for: so many members, of which one node takes so many at most."""

    fits: Fits
    members: int = 1
    on_one_node_max: int = 1


def choose_victims(
    snapshot: Snapshot, wanted: Wanted, right: Right, now_ms: int, barred: Collection[int], going: Collection[str]
) -> Victims | None:
    """The smallest sufficient set, or None. Taking any one victim out of it would not be enough.

    Rows in `barred` are not looked at, nor are tasks in `going`, which are being stopped already.
    """
    fits = wanted.fits
    rows = right.rows(fits.columns)
    rows = rows[fits.profile_ok[fits.columns.profile[rows]]]
    rows = rows[np.argsort(fits.columns.lowest[rows], kind="stable")]
    searched = [row for row in rows.tolist() if row not in barred][:ROWS_MAX]
    search = _Search(snapshot, wanted, right, now_ms, going)
    return search.on_one_row(sorted(searched)) if wanted.members == 1 else search.across(sorted(searched), barred)


class _Search:
    def __init__(self, snapshot: Snapshot, wanted: Wanted, right: Right, now_ms: int, going: Collection[str]) -> None:
        self._snapshot = snapshot
        self._wanted = wanted
        self._fits = wanted.fits
        self._right = right
        self._now_ms = now_ms
        self._going = going
        self._known: dict[str, _Candidate | None] = {}

    def on_one_row(self, rows: Sequence[int]) -> Victims | None:
        best: Victims | None = None
        for row in rows:
            candidates = self._candidates([row])
            if not self._copies(row, candidates):
                continue
            chosen = self._fewest(candidates, lambda some, row=row: self._copies(row, some) > 0, list)
            if chosen is not None:
                found = _victims((row,), chosen)
                if best is None or (len(found.tasks), found.lost) < (len(best.tasks), best.lost):
                    best = found
        return best

    def across(self, rows: Sequence[int], barred: Collection[int]) -> Victims | None:
        """For a gang: rows where members fit now count as well, and a victim may make room on several."""
        fits, members = self._fits, self._wanted.members
        fits.refresh()
        open_rows = [row for row in np.flatnonzero(fits.score > NEVER).tolist() if row not in barred]
        now = {row: self._copies(row, ()) for row in open_rows}
        useful = set(rows)
        candidates = self._candidates(rows)

        def copies(chosen: Collection[_Candidate]) -> dict[int, int]:
            touched = {row for one in chosen for row in one.held if row in useful}
            return {**now, **{row: self._copies(row, chosen) for row in touched}}

        def enough(chosen: Collection[_Candidate]) -> bool:
            return sum(copies(chosen).values()) >= members

        def by_row(candidates: Sequence[_Candidate]) -> list[_Candidate]:
            return self._row_by_row(rows, candidates, members - sum(now.values()))

        chosen = self._fewest(candidates, enough, by_row) if enough(candidates) else None
        if chosen is None:
            return None
        return _victims(tuple(sorted(row for row, count in copies(chosen).items() if count)), chosen)

    def _fewest(
        self,
        candidates: Sequence[_Candidate],
        enough: Callable[[Collection[_Candidate]], bool],
        many: Callable[[Sequence[_Candidate]], list[_Candidate]],
    ) -> tuple[_Candidate, ...] | None:
        """The smallest set that is enough and allowed; after `SETS_MAX` tries, all that `many` gives, less what is not needed."""
        tried = 0
        for size in range(1, len(candidates) + 1):
            sets = islice(combinations(candidates, size), SETS_MAX - tried)
            sufficient = [chosen for chosen in sets if enough(chosen) and self._allows(chosen)]
            if sufficient:
                return min(sufficient, key=lambda chosen: (_lost(chosen), [one.task for one in chosen]))
            tried += comb(len(candidates), size)
            if tried >= SETS_MAX:
                break
        else:
            return None
        chosen: list[_Candidate] = []
        for one in many(candidates):
            if self._allows([*chosen, one]):
                chosen.append(one)
        if not enough(chosen):
            return None
        for one in sorted(chosen, key=lambda one: (-one.lost, one.task)):
            rest = [other for other in chosen if other is not one]
            if rest and enough(rest):
                chosen = rest
        return tuple(chosen)

    def _allows(self, chosen: Collection[_Candidate]) -> bool:
        return self._right.allows([one.task for one in chosen])

    def _row_by_row(self, rows: Sequence[int], candidates: Sequence[_Candidate], missing: int) -> list[_Candidate]:
        """Those of the rows that give most for the fewest stops, until so many members more have room."""
        gains: list[tuple[float, int, int, list[_Candidate]]] = []
        for row in rows:
            here = [one for one in candidates if row in one.held]
            before = self._copies(row, ())
            for count in range(1, len(here) + 1):
                gain = self._copies(row, here[:count]) - before
                if gain > 0:
                    gains.append((count / gain, row, gain, here[:count]))
        chosen: dict[str, _Candidate] = {}
        done: set[int] = set()
        for _, row, gain, here in sorted(gains, key=lambda one: one[:3]):
            if missing <= 0:
                break
            if row not in done:
                done.add(row)
                missing -= gain
                chosen.update({one.task: one for one in here})
        # What several rows need at once may still be missing: the others follow.
        return [*chosen.values(), *(one for one in candidates if one.task not in chosen)]

    def _copies(self, row: int, chosen: Collection[_Candidate]) -> int:
        """How many members fit on the row without these tasks."""
        room = Room(self._fits, row)
        for candidate in chosen:
            for allocation in candidate.held.get(row, ()):
                room.release(self._snapshot, allocation)
        return room.copies(self._wanted.on_one_node_max)

    def _candidates(self, rows: Sequence[int]) -> list[_Candidate]:
        """Cheapest first."""
        columns, found = self._fits.columns, dict[str, _Candidate]()
        for row in rows:
            for allocation in self._snapshot.by_node.get(columns.names[row], {}).values():
                one = self._candidate(allocation.task)
                if one is not None:
                    found[one.task] = one
        return sorted(found.values(), key=lambda one: (one.lost, one.task))

    def _candidate(self, name: str) -> _Candidate | None:
        if name not in self._known:
            task, allocations = self._snapshot.tasks[name], list(self._snapshot.by_task[name].values())
            self._known[name] = None
            if name not in self._going and self._may_be_stopped(task, allocations) and self._right.covers(task):
                held: dict[int, tuple[str, ...]] = {}
                for allocation in allocations:
                    row = self._fits.columns.row_of[allocation.node]
                    held[row] = (*held.get(row, ()), allocation.id)
                every_ms = task.spec.checkpoint_every_ms
                lost = sum(lost_work(allocation, every_ms, self._now_ms) for allocation in allocations)
                self._known[name] = _Candidate(name, held, lost)
        return self._known[name]

    def _may_be_stopped(self, task: Task, allocations: list[Allocation]) -> bool:
        settings, saves_ms = self._snapshot.settings, task.spec.checkpoint_every_ms
        # Who has saved something since it started is further than before, however often it is stopped.
        runs_ms = max(settings.preempt_min_run_ms, saves_ms or 0)
        return (
            task.spec.type is not TaskType.CONTROL
            and task.cancel_reason is None
            and (saves_ms is not None or task.preemptions < settings.preemptions_max)
            and all(
                allocation.status is not AllocationStatus.STOPPING and _ran_ms(allocation, self._now_ms) >= runs_ms
                for allocation in allocations
            )
        )


def _ran_ms(allocation: Allocation, now_ms: int) -> int:
    return now_ms - (allocation.started_at_ms if allocation.started_at_ms is not None else now_ms)


def lost_work(allocation: Allocation, checkpoint_every_ms: int | None, now_ms: int) -> int:
    """What stopping it throws away at most: time since it last saved its work, if it does that, else all the time run; times
    what it holds. A GPU counts as much as ten cores.
    """
    ran_ms = _ran_ms(allocation, now_ms)
    lost_ms = ran_ms if checkpoint_every_ms is None else min(ran_ms, checkpoint_every_ms)
    return lost_ms * (10 * allocation.held.gpu_milli + allocation.held.cpu_milli)


def _victims(rows: tuple[int, ...], chosen: Collection[_Candidate]) -> Victims:
    return Victims(rows, tuple(sorted(one.task for one in chosen)), _lost(chosen))


def _lost(chosen: Collection[_Candidate]) -> int:
    return sum(one.lost for one in chosen)
