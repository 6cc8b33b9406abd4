"""Model values as JSON and back, exactly; the only form in which they are stored.

What is as its default says is left out, which makes a task a fifth of the size. So a default of the model cannot be changed
without a step of the schema that writes it into what is stored: `tests/unit/wire/test_stored_defaults.py` knows them all.
"""

from __future__ import annotations

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from crater_core.errors import StoreUnavailable
from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.node import Node
from crater_core.model.past import PastUse
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reservation import Reservation
from crater_core.model.service import Service
from crater_core.model.task import Task, TaskSpec
from crater_core.model.usage import UsageRecord

Value = TypeVar(
    "Value",
    Task,
    Allocation,
    Node,
    QuotaPolicy,
    Service,
    PastUse,
    Reservation,
    Event,
    UsageRecord,
    TaskSpec,
)

_ADAPTERS: dict[type[object], TypeAdapter[object]] = {
    kind: TypeAdapter(kind)
    for kind in (Task, Allocation, Node, QuotaPolicy, Service, PastUse, Reservation, Event, UsageRecord, TaskSpec)
}


def encode(
    value: Task | Allocation | Node | QuotaPolicy | Service | PastUse | Reservation | Event | UsageRecord | TaskSpec,
) -> bytes:
    return _ADAPTERS[type(value)].dump_json(value, exclude_defaults=True)


def decode(kind: type[Value], data: bytes) -> Value:
    """The value that was encoded. Raises StoreUnavailable when the bytes are not one: the store is damaged."""
    try:
        value = _ADAPTERS[kind].validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise StoreUnavailable(f"a stored {kind.__name__} cannot be read ({where}: {first['msg']})", kind=kind.__name__) from None
    assert isinstance(value, kind)
    return value
