"""What a decision wants written: the only shape a write can take."""

from __future__ import annotations

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
        return Changes(self.puts + later.puts, self.removed + later.removed, self.events + later.events, self.usage + later.usage)

    def __bool__(self) -> bool:
        return bool(self.puts or self.removed or self.events or self.usage)


NO_CHANGES = Changes()
