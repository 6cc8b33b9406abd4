"""Follows one run's event log."""

from __future__ import annotations

from collections.abc import Callable, Collection

from crater_dagster._dagster import DagsterEvent

Fetch = Callable[[int, Collection[int], int], list[tuple[int, DagsterEvent]]]
"""The first so many events with numbers above the first argument, in order, but for the numbers in the second."""
PAGE = 1000
OVERLAP = 300
"""So many numbers back an event is still looked for: more than are being written at one moment."""


class RunEvents:
    """Each event of the run once, in the order of their numbers as far as they can be seen.

    Where several write at once (`in_turn` is false), an event may become visible after one with a higher number. A step whose
    last event were missed so would be waited for without end, and an output would be taken for one that was not made.
    """

    def __init__(self, fetch: Fetch, in_turn: bool, page: int = PAGE) -> None:
        self._fetch, self._overlap, self._page = fetch, 0 if in_turn else OVERLAP, page
        self._last = -1
        self._known: list[int] = []
        """The numbers within the overlap that have been handed out."""

    def new(self) -> list[DagsterEvent]:
        """What was not handed out before."""
        found: list[DagsterEvent] = []
        while True:
            rows = self._fetch(self._last - self._overlap, self._known, self._page)
            found += [event for _, event in rows]
            numbers = [number for number, _ in rows]
            self._last = max([self._last, *numbers])
            self._known = [number for number in (*self._known, *numbers) if number > self._last - self._overlap]
            if len(rows) < self._page:
                return found
