"""Who is next: control tasks, then priority, raised by waiting, then the project with the smaller share, then age."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from crater_core.model.snapshot import Settings
from crater_core.model.units import MILLI
from crater_core.scheduling.fairness import Shares
from crater_core.scheduling.queue import Lane, Place

UNKNOWN_RUN_MS = 24 * 3_600_000
"""What a task counts for, with `short_first_milli`, whose run time nobody declared or could foretell."""
RAISE = 10
"""By how much a task's priority counts for more after each `raise_after_ms` of waiting. It has no upper end, so whoever comes
long enough after a task cannot go before it: see `passed_at_most_ms`."""
Rank = tuple[int, int]
"""Smaller goes first: control tasks, then the priority that counts, negated."""


def passed_at_most_ms(priority: int, settings: Settings) -> int | None:
    """The bound on being passed: a task that entered the queue so long after one of this priority never goes before it. None:
    waiting raises nobody, so there is no bound.
    """
    if not settings.raise_after_ms:
        return None
    return ((100 - priority) // RAISE + 1) * settings.raise_after_ms


class Ranks:
    """The rank of each place of a lane, at one time."""

    def __init__(self, settings: Settings, now_ms: int) -> None:
        self._after_ms, self._now_ms = settings.raise_after_ms, now_ms
        self._short_first_milli = settings.short_first_milli

    def of(self, lane: Lane, place: Place) -> Rank:
        if not self._after_ms or lane.control:
            return 0 if lane.control else 1, -lane.priority
        return 1, -lane.priority - RAISE * (max(0, self._now_ms - place[0]) // self._after_ms)

    def later_ms(self, lane: Lane) -> int:
        """How much younger than they are a lane's tasks count among tasks of one rank: by a part of their expected run time."""
        if not self._short_first_milli:
            return 0
        runs_ms = lane.limit_ms if lane.limit_ms is not None else lane.foretold_ms
        return self._short_first_milli * (UNKNOWN_RUN_MS if runs_ms is None else runs_ms) // MILLI

    def ahead_in(self, lane: Lane, rank: Rank) -> tuple[int, int]:
        """How many of a lane's tasks rank before `rank`, and how many not after it. Older ones are never behind."""
        if self.of(lane, (self._now_ms, "")) < rank:
            return len(lane.places), len(lane.places)
        if not self._after_ms or lane.control:
            return 0, len(lane.places) if self.of(lane, (self._now_ms, "")) == rank else 0
        if rank[0] == 0:
            return 0, 0
        short = -rank[1] - lane.priority
        return self._waiting_since(lane, short // RAISE + 1), self._waiting_since(lane, -(-short // RAISE))

    def _waiting_since(self, lane: Lane, raises: int) -> int:
        """How many of the lane's tasks have been raised so often."""
        if raises <= 0:
            return len(lane.places)
        return bisect_left(lane.places, (self._now_ms - raises * self._after_ms + 1, ""))


_First = tuple[int, str, Lane, int]
"""A place, the lane in which it is the first that has not been given, and where there. No two places are equal."""


class _Group:
    """The lanes of one project at one rank, by what stands first in them."""

    __slots__ = ("heap", "project", "rank")

    def __init__(self, rank: Rank, project: str) -> None:
        self.rank = rank
        self.project = project
        self.heap: list[_First] = []

    def push(self, lane: Lane, start: int, later_ms: int) -> None:
        queued_at_ms, task = lane.places[start]
        heapq.heappush(self.heap, (queued_at_ms + later_ms, task, lane, start))

    def pop(self) -> tuple[Lane, int]:
        return heapq.heappop(self.heap)[2:]


class Order:
    """Gives lanes with the position of their next task. Whoever places that task says so with `advance`."""

    def __init__(self, lanes: Iterable[Lane], shares: Shares, ranks: Ranks) -> None:
        self._shares = shares
        self._ranks = ranks
        self._groups: dict[tuple[Rank, str], _Group] = {}
        for lane in lanes:
            self._group_of(lane, ranks.of(lane, lane.places[0])).push(lane, 0, ranks.later_ms(lane))
        self._heap = [self._entry(group) for group in self._groups.values()]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[tuple[Lane, int]]:
        while self._heap:
            entry = self._heap[0]
            group = entry[-1]
            if not group.heap:
                heapq.heappop(self._heap)
            elif entry[2] != self._shares.of(group.project) or entry[3] is not group.heap[0]:
                # It has been given something since, or an older task stands first by now.
                heapq.heapreplace(self._heap, self._entry(group))
            else:
                self._group = group
                yield group.pop()

    def advance(self, lane: Lane, start: int) -> None:
        """The lane just given goes on with its task at `start`."""
        if start >= len(lane.places):
            return
        rank = self._ranks.of(lane, lane.places[start])
        group = self._group if rank == self._group.rank else self._group_of(lane, rank)
        group.push(lane, start, self._ranks.later_ms(lane))
        if group is not self._group:  # It may have left the heap, or stand there with a later task.
            heapq.heappush(self._heap, self._entry(group))

    def _group_of(self, lane: Lane, rank: Rank) -> _Group:
        key = (rank, lane.project)
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = _Group(*key)
        return found

    def _entry(self, group: _Group) -> tuple[int, int, int, _First, int, _Group]:
        # A group may stand in the heap twice: its id keeps two groups from being compared.
        return (*group.rank, self._shares.of(group.project), group.heap[0], id(group), group)
