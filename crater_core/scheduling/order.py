"""Who is next: control tasks, then priority, then the project that holds less of the cluster, then age."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from crater_core.scheduling.fairness import Shares
from crater_core.scheduling.queue import Lane, Place


class _Group:
    """The lanes of one project at one priority, by what stands first in them."""

    __slots__ = ("heap", "lanes", "project", "rank")

    def __init__(self, rank: tuple[int, int], project: str) -> None:
        self.rank = rank
        self.project = project
        self.heap: list[Place] = []
        self.lanes: dict[str, tuple[Lane, int]] = {}

    def push(self, lane: Lane, start: int) -> None:
        place = lane.places[start]
        self.lanes[place[1]] = (lane, start)
        heapq.heappush(self.heap, place)

    def pop(self) -> tuple[Lane, int]:
        return self.lanes.pop(heapq.heappop(self.heap)[1])


class Order:
    """Gives lanes with the position of their next task. Whoever places that task says so with `advance`."""

    def __init__(self, lanes: Iterable[Lane], shares: Shares) -> None:
        self._shares = shares
        groups: dict[tuple[int, int, str], _Group] = {}
        for lane in lanes:
            rank = (0 if lane.control else 1, -lane.priority)
            key = (*rank, lane.project)
            if key not in groups:
                groups[key] = _Group(rank, lane.project)
            groups[key].push(lane, 0)
        self._heap = [self._entry(group) for group in groups.values()]
        heapq.heapify(self._heap)

    def __iter__(self) -> Iterator[tuple[Lane, int]]:
        while self._heap:
            entry = self._heap[0]
            group = entry[-1]
            if not group.heap:
                heapq.heappop(self._heap)
            elif entry[2] != self._shares.of(group.project) or entry[3] != group.heap[0]:
                # It has been given something since, or an older task stands first by now.
                heapq.heapreplace(self._heap, self._entry(group))
            else:
                self._group = group
                yield group.pop()

    def advance(self, lane: Lane, start: int) -> None:
        """The lane just given goes on with its task at `start`."""
        if start < len(lane.places):
            self._group.push(lane, start)

    def _entry(self, group: _Group) -> tuple[int, int, int, Place, _Group]:
        # Groups never compare: a place holds a task's id, and a task stands in one group.
        return (*group.rank, self._shares.of(group.project), group.heap[0], group)
