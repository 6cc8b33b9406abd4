"""Model values as rows, and a commit as bytes: the shapes that every durable store writes, whatever its kind."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from crater_core.errors import StoreUnavailable
from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.node import Node
from crater_core.model.past import PastUse
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reservation import Reservation
from crater_core.model.service import Service
from crater_core.model.snapshot import Entity
from crater_core.model.task import Task, TaskStatus
from crater_core.model.usage import UsageRecord
from crater_core.store.codec import decode, encode
from crater_core.store.protocol import Commit, SubmitKey

_Object = type[Node] | type[QuotaPolicy] | type[Service] | type[PastUse] | type[Reservation]
KINDS: dict[str, _Object] = {"node": Node, "policy": QuotaPolicy, "service": Service, "past": PastUse, "reservation": Reservation}
_KIND_NAMES: dict[type[Entity], str] = {kind: name for name, kind in KINDS.items()}
_MAY_BE_NEW = (TaskStatus.QUEUED, TaskStatus.ALLOCATED, TaskStatus.CANCELLED)
"""What a task can have become by the end of the commit that submits it."""

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """`changing` are the columns that a row with a known key gets anew; None: such a row must not be there yet."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    changing: tuple[str, ...] | None = None


TABLES = {
    table.name: table
    for table in (
        Table(
            "tasks",
            ("id", "revision", "live", "status", "project", "user", "name", "task_group", "service", "ended_at_ms", "body"),
            ("id",),
            ("revision", "live", "status", "ended_at_ms", "body"),
        ),
        Table("labels", ("name", "value", "task"), ("name", "value", "task"), ()),
        Table("allocations", ("id", "task", "attempt", "live", "body"), ("id",), ("live", "body")),
        Table("objects", ("kind", "id", "revision", "body"), ("kind", "id"), ("revision", "body")),
        Table("submit_keys", ("key", "user", "task", "digest"), ("key", "user")),
        Table("events", ("sequence", "at_ms", "subject", "id", "task_group", "body"), ("sequence",)),
        Table("usage", ("allocation", "from_ms", "to_ms", "body"), ("allocation",), ("from_ms", "to_ms", "body")),
    )
}
"""In the order in which they are written. A column is quoted in SQL: `user` is a word of PostgreSQL's."""


@dataclass(slots=True)
class Rows:
    """What one commit writes: rows by table, and the keys of objects that are removed."""

    revision: int
    sequence: int
    tables: dict[str, list[Row]] = field(default_factory=lambda: {})
    removed: list[tuple[str, str]] = field(default_factory=lambda: [])


def rows_of(changes: Changes, revision: int, sequence: int, keys: Sequence[SubmitKey] = ()) -> Rows:
    """The commit that leads to `revision`, with its history numbered from behind `sequence`."""
    tables: dict[str, list[Row]] = {name: [] for name in TABLES}
    for entity in changes.puts:
        if isinstance(entity, Task):
            spec, live = entity.spec, int(not entity.status.ended)
            facts = (entity.status.value, spec.project, spec.user, spec.name, spec.group, spec.service, entity.ended_at_ms)
            tables["tasks"].append((entity.id, revision, live, *facts, encode(entity)))
            if entity.attempt <= 1 and entity.status in _MAY_BE_NEW:  # A task's labels never change after its submit.
                tables["labels"].extend((name, value, entity.id) for name, value in spec.labels.items())
        elif isinstance(entity, Allocation):
            live = int(not entity.status.ended)
            tables["allocations"].append((entity.id, entity.task, entity.attempt, live, encode(entity)))
        else:
            tables["objects"].append((_KIND_NAMES[type(entity)], entity.name, revision, encode(entity)))
    tables["submit_keys"] = [(key.key, key.user, key.task, key.digest) for key in keys]
    tables["events"] = [
        (sequence + n, event.at_ms, event.subject, event.id, event.group, encode(event))
        for n, event in enumerate(changes.events, start=1)
    ]
    tables["usage"] = [(record.allocation, record.from_ms, record.to_ms, encode(record)) for record in changes.usage]
    removed = [(_KIND_NAMES[kind], name) for kind, name in changes.removed if kind in _KIND_NAMES]
    written = {name: found for name, found in tables.items() if found}
    return Rows(revision, sequence + len(changes.events), written, removed)


def commit_of(rows: Rows) -> Commit:
    """The commit as a follower takes it in."""
    found = rows.tables
    puts: list[Entity] = [decode(KINDS[row[0]], row[-1]) for row in found.get("objects", ())]  # type: ignore[misc]
    puts += [decode(Task, row[-1]) for row in found.get("tasks", ())]
    puts += [decode(Allocation, row[-1]) for row in found.get("allocations", ())]
    removed = tuple((KINDS[kind], name) for kind, name in rows.removed)
    events = tuple(decode(Event, row[-1]) for row in found.get("events", ()))
    usage = tuple(decode(UsageRecord, row[-1]) for row in found.get("usage", ()))
    return Commit(rows.revision, rows.sequence, Changes(tuple(puts), removed, events, usage))


def pack(rows: Rows) -> bytes:
    """One commit as bytes."""
    tables = {name: [plain(name, row) for row in found] for name, found in rows.tables.items()}
    whole = {"revision": rows.revision, "sequence": rows.sequence, "tables": tables, "removed": rows.removed}
    return zlib.compress(json.dumps(whole, separators=(",", ":")).encode(), 1)


def unpack(data: bytes) -> Rows:
    try:
        whole = cast("dict[str, Any]", json.loads(zlib.decompress(data)))
        tables = {name: [unplain(name, row) for row in found] for name, found in whole["tables"].items()}
        return Rows(whole["revision"], whole["sequence"], tables, [(kind, name) for kind, name in whole["removed"]])
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise StoreUnavailable(f"a stored commit cannot be read: {error}") from error


def plain(table: str, row: Row) -> list[Any]:
    """A row as JSON takes it. Only the last column holds bytes: JSON text, or the digest of a submit key."""
    last: Any = row[-1]
    if table == "submit_keys":
        last = bytes(last).hex()
    elif table != "labels":
        last = bytes(last).decode()
    return [*row[:-1], last]


def unplain(table: str, row: Iterable[Any]) -> Row:
    values = list(row)
    if table == "submit_keys":
        values[-1] = bytes.fromhex(values[-1])
    elif table != "labels":
        values[-1] = values[-1].encode()
    return tuple(values)
