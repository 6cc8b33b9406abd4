"""What one turn of the engine has decided so far: the working snapshot moved on, and one set of changes to commit."""

from __future__ import annotations

from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.node import Node
from crater_core.model.past import PastUse
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reservation import Reservation
from crater_core.model.service import Service
from crater_core.model.snapshot import Entity, Snapshot
from crater_core.model.task import Task, TaskStatus
from crater_core.model.usage import UsageRecord
from crater_core.store.protocol import SubmitKey


def id_of(entity: Entity) -> str:
    return entity.id if isinstance(entity, (Task, Allocation)) else entity.name


class Batch:
    """Collects the changes of several inputs. An entity that is put twice is written once, as it is at the end."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.puts: dict[tuple[type[Entity], str], Entity] = {}
        self.removed: dict[tuple[type[Entity], str], None] = {}
        self.events: list[Event] = []
        self.usage: list[UsageRecord] = []
        self.keys: dict[tuple[str, str], SubmitKey] = {}
        self.makes_room = False
        """Something happened after which another task may fit, or a new one waits."""
        self.touches_services = False

    def take(self, changes: Changes) -> None:
        for entity in changes.puts:
            key: tuple[type[Entity], str] = (type(entity), id_of(entity))
            self.puts[key] = entity
            self.removed.pop(key, None)
            self._note(entity)
        for gone in changes.removed:
            self.puts.pop(gone, None)
            self.removed[gone] = None
            self.makes_room = True
        self.events.extend(changes.events)
        self.usage.extend(changes.usage)
        self.snapshot.advance(changes.puts, changes.removed)

    def _note(self, entity: Entity) -> None:
        match entity:
            case Task():
                self.makes_room |= entity.status is TaskStatus.QUEUED or (entity.status.ended and bool(self.snapshot.dependents))
                self.touches_services |= entity.spec.service is not None
            case Allocation():
                self.makes_room |= entity.status.ended
            case Service():
                self.touches_services = True
            case Node():
                self.makes_room = self.touches_services = True
            case QuotaPolicy() | Reservation():
                self.makes_room = True
            case PastUse():
                pass

    @property
    def changes(self) -> Changes:
        return Changes(tuple(self.puts.values()), tuple(self.removed), tuple(self.events), tuple(self.usage))
