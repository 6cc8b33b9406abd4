"""Why tasks wait, kept by stretches of lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.task import Task
from crater_core.scheduling.queue import Place


class Waiting(Mapping[str, Reason]):
    """Task id to reason. Holds whole stretches of lanes, so that a hundred thousand tasks with one reason cost little.

    `held` are those that no cycle looks at, as they come after others.
    """

    def __init__(self, held: Mapping[str, Reason]) -> None:
        self._held = held
        self._stretches: list[tuple[list[Place], Reason]] = []
        self._by_task: dict[str, Reason] | None = None

    def add(self, places: list[Place], reason: Reason) -> None:
        self._stretches.append((places, reason))
        self._by_task = None

    def __getitem__(self, task: str) -> Reason:
        held = self._held.get(task)
        if held is not None:
            return held
        if self._by_task is None:
            self._by_task = {name: reason for places, reason in self._stretches for _, name in places}
        return self._by_task[task]

    def __iter__(self) -> Iterator[str]:
        yield from (name for places, _ in self._stretches for _, name in places)
        yield from self._held

    def __len__(self) -> int:
        return sum(len(places) for places, _ in self._stretches) + len(self._held)

    def __repr__(self) -> str:
        return repr(dict(self))


def backing_off(task: Task, now_ms: int) -> Reason:
    before = task.reason
    if before is None:
        why: str | int = "it was asked to wait"
    elif before.code is ReasonCode.BACKOFF:
        why = before.facts.get("why", "")
    else:
        why = sentence(before).rstrip(".")
    return Reason.of(ReasonCode.BACKOFF, why=why, wait_ms=task.not_before_ms - now_ms)
