"""Model values as rows of the SQLite schema, and back."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.node import Node
from crater_core.model.quota import QuotaPolicy
from crater_core.model.service import Service
from crater_core.model.snapshot import Entity
from crater_core.model.task import Task, TaskStatus
from crater_core.store.codec import decode, encode
from crater_core.store.protocol import StoredTask, SubmitKey, TaskFilter

_KINDS: dict[str, type[Node] | type[QuotaPolicy] | type[Service]] = {"node": Node, "policy": QuotaPolicy, "service": Service}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}
_IDS_MAX = 500
"""Values in one IN (...): far below SQLite's bound on parameters."""

_MAY_BE_NEW = (TaskStatus.QUEUED, TaskStatus.ALLOCATED, TaskStatus.CANCELLED)
"""What a task can have become by the end of the commit that submits it."""

Row = tuple[Any, ...]


@dataclass(slots=True)
class Encoded:
    """Rows to write, made before the transaction begins."""

    tasks: list[Row] = field(default_factory=lambda: [])
    labels: list[Row] = field(default_factory=lambda: [])
    allocations: list[Row] = field(default_factory=lambda: [])
    objects: list[Row] = field(default_factory=lambda: [])
    removed: list[Row] = field(default_factory=lambda: [])
    events: list[Row] = field(default_factory=lambda: [])
    usage: list[Row] = field(default_factory=lambda: [])


def encode_changes(changes: Changes, revision: int) -> Encoded:
    out = Encoded()
    for entity in changes.puts:
        if isinstance(entity, Task):
            spec, live = entity.spec, not entity.status.ended
            facts = (entity.status.value, spec.project, spec.user, spec.name, spec.group, spec.service, entity.ended_at_ms)
            out.tasks.append((entity.id, revision, live, *facts, encode(entity)))
            if entity.attempt <= 1 and entity.status in _MAY_BE_NEW:  # A task's labels never change after its submit.
                out.labels.extend((name, value, entity.id) for name, value in spec.labels.items())
        elif isinstance(entity, Allocation):
            out.allocations.append((entity.id, entity.task, entity.attempt, not entity.status.ended, encode(entity)))
        else:
            out.objects.append((_KIND_NAMES[type(entity)], entity.name, revision, encode(entity)))
    out.removed = [(_KIND_NAMES[kind], name) for kind, name in changes.removed if kind in (Node, QuotaPolicy, Service)]
    out.events = [(event.at_ms, event.subject, event.id, event.group, encode(event)) for event in changes.events]
    out.usage = [(record.allocation, record.from_ms, record.to_ms, encode(record)) for record in changes.usage]
    return out


_PUT_TASK = """
INSERT INTO tasks (id, revision, live, status, project, user, name, task_group, service, ended_at_ms, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET
    revision = excluded.revision, live = excluded.live, status = excluded.status,
    ended_at_ms = excluded.ended_at_ms, body = excluded.body
"""
_PUT_ALLOCATION = """
INSERT INTO allocations (id, task, attempt, live, body) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET live = excluded.live, body = excluded.body
"""
_PUT_OBJECT = """
INSERT INTO objects (kind, id, revision, body) VALUES (?, ?, ?, ?)
ON CONFLICT (kind, id) DO UPDATE SET revision = excluded.revision, body = excluded.body
"""


def write_changes(db: sqlite3.Connection, encoded: Encoded, keys: Sequence[SubmitKey], sequence: int) -> None:
    numbered = [(sequence + n, *row) for n, row in enumerate(encoded.events, start=1)]
    key_rows = [(key.key, key.user, key.task, key.digest) for key in keys]
    for sql, found in (
        (_PUT_TASK, encoded.tasks),
        ("INSERT OR IGNORE INTO labels (name, value, task) VALUES (?, ?, ?)", encoded.labels),
        (_PUT_ALLOCATION, encoded.allocations),
        (_PUT_OBJECT, encoded.objects),
        ("DELETE FROM objects WHERE kind = ? AND id = ?", encoded.removed),
        ("INSERT INTO submit_keys (key, user, task, digest) VALUES (?, ?, ?, ?)", key_rows),
        ("INSERT INTO events (sequence, at_ms, subject, id, task_group, body) VALUES (?, ?, ?, ?, ?, ?)", numbered),
        ("INSERT OR REPLACE INTO usage (allocation, from_ms, to_ms, body) VALUES (?, ?, ?, ?)", encoded.usage),
    ):
        if found:
            db.executemany(sql, found)


def read_live(db: sqlite3.Connection) -> tuple[tuple[Entity, ...], tuple[Allocation, ...], dict[str, int]]:
    """Everything live, the ended allocations of live tasks, and each live task's revision."""
    entities: list[Entity] = []
    for kind, body in db.execute("SELECT kind, body FROM objects ORDER BY kind, id"):
        entities.append(decode(cast("type[Node]", _KINDS[kind]), body))
    revisions: dict[str, int] = {}
    for task_id, revision, body in db.execute("SELECT id, revision, body FROM tasks WHERE live = 1 ORDER BY id"):
        revisions[task_id] = revision
        entities.append(decode(Task, body))
    closed: list[Allocation] = []
    of_live = """
        SELECT a.live, a.body FROM tasks t CROSS JOIN allocations a ON a.task = t.id WHERE t.live = 1 ORDER BY a.id
    """
    for live, body in db.execute(of_live):
        (entities if live else closed).append(decode(Allocation, body))
    return tuple(entities), tuple(closed), revisions


def with_allocations(db: sqlite3.Connection, found: Sequence[Row]) -> list[StoredTask]:
    """Rows of (id, revision, body) with the allocations of each task's last attempt."""
    held: dict[str, list[Allocation]] = defaultdict(list)
    for ids in _in_steps([row[0] for row in found]):
        marks = ", ".join("?" * len(ids))
        sql = f"SELECT task, body FROM allocations WHERE task IN ({marks}) ORDER BY id"  # noqa: S608
        for task_id, body in db.execute(sql, ids):
            held[task_id].append(decode(Allocation, body))
    out: list[StoredTask] = []
    for task_id, revision, body in found:
        task = decode(Task, body)
        out.append(StoredTask(task, tuple(a for a in held[task_id] if a.attempt == task.attempt), revision))
    return out


def _in_steps(ids: list[str]) -> Iterable[list[str]]:
    return (ids[start : start + _IDS_MAX] for start in range(0, len(ids), _IDS_MAX))


def conditions(wanted: TaskFilter) -> tuple[list[str], list[str]]:
    """The filter as SQL conditions with their values."""
    where: list[str] = []
    values: list[str] = []
    if wanted.statuses:
        if all(not TaskStatus(status).ended for status in wanted.statuses):
            where.append("live = 1")  # Keeps a look at the queue off the whole history.
        where.append(f"status IN ({', '.join('?' * len(wanted.statuses))})")
        values.extend(wanted.statuses)
    columns = ("project", "user", "name", "task_group", "service")
    given = (wanted.project, wanted.user, wanted.name, wanted.group, wanted.service)
    for column, value in zip(columns, given, strict=True):
        if value is not None:
            where.append(f"{column} = ?")
            values.append(value)
    for label in wanted.labels:
        where.append("id IN (SELECT task FROM labels WHERE name = ? AND value = ?)")
        values.extend(label)
    if wanted.key is not None:
        where.append("id IN (SELECT task FROM submit_keys WHERE key = ?)")
        values.append(wanted.key)
    return where, values


def prune(db: sqlite3.Connection, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int) -> int:
    ended = int(db.execute("SELECT count(*) FROM tasks WHERE live = 0").fetchone()[0])
    oldest = db.execute("SELECT id, ended_at_ms FROM tasks WHERE live = 0 ORDER BY ended_at_ms, id LIMIT ?", (step,)).fetchall()
    gone = [(row[0],) for n, row in enumerate(oldest) if n < ended - tasks_max or row[1] < ended_before_ms]
    for sql in (
        "DELETE FROM labels WHERE task = ?",
        "DELETE FROM submit_keys WHERE task = ?",
        "DELETE FROM allocations WHERE task = ?",
        "DELETE FROM events WHERE subject = 'task' AND id = ?",
        "DELETE FROM tasks WHERE id = ?",
    ):
        db.executemany(sql, gone)
    db.execute("DELETE FROM events WHERE at_ms < ? AND subject <> 'task'", (ended_before_ms,))
    db.execute("DELETE FROM usage WHERE to_ms < ?", (usage_before_ms,))
    return len(gone)
