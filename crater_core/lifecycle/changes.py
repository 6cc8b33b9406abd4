"""What a decision wants written: the only shape a write can take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from crater_core.model.history import Event
from crater_core.model.snapshot import Entity
from crater_core.model.usage import UsageRecord


@dataclass(frozen=True, slots=True)
class Changes:
    """Entities to put, entities to remove, lines of history to add, and usage records to close, all in one commit."""

    puts: tuple[Entity, ...] = ()
    removed: tuple[tuple[type[Entity], str], ...] = ()
    events: tuple[Event, ...] = ()
    usage: tuple[UsageRecord, ...] = ()

    def __add__(self, later: Changes) -> Changes:
        if not later:
            return self
        return Changes(self.puts + later.puts, self.removed + later.removed, self.events + later.events, self.usage + later.usage)

    def __bool__(self) -> bool:
        return bool(self.puts or self.removed or self.events or self.usage)


NO_CHANGES = Changes()


def joined(parts: Iterable[Changes]) -> Changes:
    """Many changes as one, in order; unlike repeated `+`, at a cost that grows with their number alone."""
    puts: list[Entity] = []
    removed: list[tuple[type[Entity], str]] = []
    events: list[Event] = []
    usage: list[UsageRecord] = []
    for part in parts:
        puts.extend(part.puts)
        removed.extend(part.removed)
        events.extend(part.events)
        usage.extend(part.usage)
    return Changes(tuple(puts), tuple(removed), tuple(events), tuple(usage))
