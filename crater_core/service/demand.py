"""Counts what tasks ask for, so that room can be kept for those that usually come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from crater_core.model.resources import Request, TypicalRequest
from crater_core.model.task import TaskSpec, TaskType

REQUESTS_MAX = 20_000
"""When so many have been counted, each counts half as much: old ones fade."""


class Demand:
    """What tasks have asked for, the newer ones more."""

    def __init__(self, specs: Iterable[TaskSpec] = ()) -> None:
        self.counts: Counter[Request] = Counter()
        self.total = 0
        self.strategies: set[str] = set()
        """Named by tasks themselves."""
        for spec in specs:
            self.count(spec)

    def count(self, spec: TaskSpec) -> None:
        if spec.type is TaskType.CONTROL:
            return
        if spec.strategy is not None:
            self.strategies.add(spec.strategy)
        self.counts[spec.request] += spec.members
        self.total += spec.members
        if self.total >= REQUESTS_MAX:
            self.counts = Counter({request: count // 2 for request, count in self.counts.items() if count > 1})
            self.total = self.counts.total()

    def workload(self) -> tuple[TypicalRequest, ...]:
        """Most frequent first."""
        ranked = sorted(self.counts.items(), key=lambda item: (-item[1], repr(item[0])))
        return tuple(TypicalRequest(request, count) for request, count in ranked)
