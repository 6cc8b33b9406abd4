"""What a decision sees, as a file to send with a report, and back: the same snapshot gives the same plan anywhere."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from crater_core import __version__
from crater_core.errors import InvalidRequest
from crater_core.model.allocation import Allocation
from crater_core.model.node import Node
from crater_core.model.past import PastUse
from crater_core.model.prices import Make, MakePrices, PriceTable
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reservation import Reservation
from crater_core.model.resources import TypicalRequest
from crater_core.model.scrubbed import scrubbed
from crater_core.model.service import Service
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task

FORM = 1
"""Of the file; another reader refuses what it does not know."""
BYTES_MAX = 2 << 30
"""Of the file unpacked: more is no snapshot of a cluster."""


@dataclass(frozen=True, slots=True)
class _Prices:
    workload: tuple[TypicalRequest, ...]
    makes: tuple[tuple[Make, MakePrices], ...]


@dataclass(frozen=True, slots=True)
class _Content:
    form: int
    written_by: str
    now_ms: int
    revision: int
    term: int
    settings: Settings
    prices: _Prices | None
    nodes: tuple[Node, ...]
    policies: tuple[QuotaPolicy, ...]
    services: tuple[Service, ...]
    past: tuple[PastUse, ...]
    reservations: tuple[Reservation, ...]
    tasks: tuple[Task, ...]
    allocations: tuple[Allocation, ...]


_CONTENT = TypeAdapter(_Content)


def write_snapshot(snapshot: Snapshot, now_ms: int) -> bytes:
    """Compressed JSON, without secrets (see `scrubbed`)."""
    clean, table = scrubbed(snapshot), snapshot.prices
    prices = None if table is None else _Prices(table.workload, tuple(table.makes.items()))
    content = _Content(
        *(FORM, __version__, now_ms, clean.revision, clean.term, clean.settings, prices),
        nodes=tuple(clean.nodes.values()),
        policies=tuple(clean.policies.values()),
        services=tuple(clean.services.values()),
        past=tuple(clean.past.values()),
        reservations=tuple(clean.reservations.values()),
        tasks=tuple(clean.tasks.values()),
        allocations=tuple(clean.allocations.values()),
    )
    return gzip.compress(_CONTENT.dump_json(content), compresslevel=6, mtime=0)


def read_snapshot(data: bytes, name: str = "the file") -> tuple[Snapshot, int]:
    """The snapshot, and the time at which it was taken. Raises InvalidRequest for what is none."""
    content = _checked(_unpacked(data, name), name)
    snapshot = Snapshot(content.settings, content.revision, content.term)
    if content.prices is not None:
        snapshot.prices = PriceTable(content.prices.workload, dict(content.prices.makes))
    for entities in (content.nodes, content.policies, content.services, content.past, content.reservations):
        snapshot.advance(entities)
    snapshot.advance(content.tasks)
    snapshot.advance(content.allocations)
    return snapshot, content.now_ms


def _unpacked(data: bytes, name: str) -> bytes:
    reader = zlib.decompressobj(wbits=31)
    try:
        text = reader.decompress(data, BYTES_MAX)
    except zlib.error:
        text = b""
    if not reader.eof:
        raise InvalidRequest(f"{name} is no whole file of `crater debug snapshot`", field="file")
    return text


def _checked(text: bytes, name: str) -> _Content:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    form = cast("dict[str, Any]", found).get("form") if isinstance(found, dict) else None
    if form != FORM:
        raise InvalidRequest(f"{name} has form {form!r}; this version reads form {FORM}", field="file")
    try:
        return _CONTENT.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{name} cannot be read ({where}: {first['msg']})", field="file") from None
