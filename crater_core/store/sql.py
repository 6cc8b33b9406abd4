"""The statements and reads that SQLite and PostgreSQL share. Values are marked `?`; each store puts its own mark there."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.snapshot import Entity
from crater_core.model.task import Task, TaskStatus
from crater_core.model.usage import UsageRecord
from crater_core.store.codec import decode
from crater_core.store.protocol import Loaded, StoredEvent, StoredTask, SubmitKey, TaskFilter
from crater_core.store.rows import KINDS, TABLES, Row, Rows, Table

Query = Callable[..., Sequence[Row]]
"""`query(sql, values)` gives all rows."""
_IDS_MAX = 500
"""Values in one IN (...): far below every bound on parameters."""


def put_statement(table: Table) -> str:
    columns = ", ".join(f'"{name}"' for name in table.columns)
    marks = ", ".join("?" * len(table.columns))
    sql = f"INSERT INTO {table.name} ({columns}) VALUES ({marks})"  # noqa: S608
    if table.changing is None:
        return sql
    known = ", ".join(f'"{name}"' for name in table.key)
    if not table.changing:
        return f"{sql} ON CONFLICT ({known}) DO NOTHING"
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name in table.changing)
    return f"{sql} ON CONFLICT ({known}) DO UPDATE SET {changed}"


def replace_statement(table: Table) -> str:
    """Puts the whole row, whatever was there."""
    columns = ", ".join(f'"{name}"' for name in table.columns)
    return f"INSERT OR REPLACE INTO {table.name} ({columns}) VALUES ({', '.join('?' * len(table.columns))})"  # noqa: S608


PUTS = {name: put_statement(table) for name, table in TABLES.items()}
REMOVE = "DELETE FROM objects WHERE kind = ? AND id = ?"


def write_rows(many: Callable[[str, Sequence[Row]], object], rows: Rows) -> None:
    """`many(sql, rows)` executes one statement for each row."""
    for name, sql in PUTS.items():
        found = rows.tables.get(name)
        if found:
            many(sql, found)
    if rows.removed:
        many(REMOVE, rows.removed)


def select_all(table: Table) -> str:
    columns = ", ".join(f'"{name}"' for name in table.columns)
    return f"SELECT {columns} FROM {table.name}"  # noqa: S608


def fill(many: Callable[[str, Sequence[Row]], object], rows: Iterable[tuple[str, Row]]) -> None:
    """Put these rows in the place of all that is there."""
    waiting: dict[str, list[Row]] = {name: [] for name in TABLES}
    for name in TABLES:
        many(f"DELETE FROM {name}", [()])  # noqa: S608
    for name, row in rows:
        waiting[name].append(row)
        if len(waiting[name]) == _IDS_MAX:
            many(PUTS[name], waiting[name])
            waiting[name] = []
    for name, left in waiting.items():
        if left:
            many(PUTS[name], left)


def prune(query: Query, many: Callable[[str, Sequence[Row]], object], bounds: tuple[int, int, int, int]) -> int:
    ended_before_ms, tasks_max, usage_before_ms, step = bounds
    ended = int(query("SELECT count(*) FROM tasks WHERE live = 0")[0][0])
    oldest = query("SELECT id, ended_at_ms FROM tasks WHERE live = 0 ORDER BY ended_at_ms, id LIMIT ?", (step,))
    gone = [(row[0],) for n, row in enumerate(oldest) if n < ended - tasks_max or row[1] < ended_before_ms]
    if gone:
        for sql in (
            "DELETE FROM labels WHERE task = ?",
            "DELETE FROM submit_keys WHERE task = ?",
            "DELETE FROM allocations WHERE task = ?",
            "DELETE FROM events WHERE subject = 'task' AND id = ?",
            "DELETE FROM tasks WHERE id = ?",
        ):
            many(sql, gone)
    many("DELETE FROM events WHERE at_ms < ? AND subject <> 'task'", [(ended_before_ms,)])
    many("DELETE FROM usage WHERE to_ms < ?", [(usage_before_ms,)])
    return len(gone)


class SqlReads:
    """The reading half of `Store`, on SQL."""

    @abstractmethod
    def _view(self, point: bool = False) -> AbstractContextManager[Query]:
        """Queries that all see one state. `point`: a single row, which must not wait behind long lists."""

    def load(self) -> Loaded:
        with self._view() as query:
            revision, term, sequence = query("SELECT revision, term, sequence FROM standing")[0]
            entities, closed, revisions = _live(query)
        return Loaded(revision, term, sequence, entities, closed, revisions)

    def find_key(self, user: str, key: str) -> SubmitKey | None:
        with self._view(point=True) as query:
            rows = query('SELECT task, digest FROM submit_keys WHERE key = ? AND "user" = ?', (key, user))
        return SubmitKey(user, key, rows[0][0], bytes(rows[0][1])) if rows else None

    def task(self, task_id: str) -> StoredTask | None:
        with self._view() as query:
            found = query("SELECT id, revision, body FROM tasks WHERE id = ?", (task_id,))
            return next(iter(_with_allocations(query, found)), None)

    def tasks(self, wanted: TaskFilter, limit: int, before: str | None = None) -> list[StoredTask]:
        where, values = _conditions(wanted)
        if before is not None:
            where.append("id < ?")
            values.append(before)
        sql = f"SELECT id, revision, body FROM tasks {'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY id DESC LIMIT ?"  # noqa: S608
        with self._view() as query:
            return _with_allocations(query, query(sql, (*values, limit)))

    def tasks_changed(self, after: int, group: str | None, limit: int) -> tuple[list[StoredTask], int]:
        of_group, values = ("AND task_group = ?", (group,)) if group is not None else ("", ())
        sql = f"SELECT id, revision, body FROM tasks WHERE revision > ? {of_group} ORDER BY revision, id LIMIT ?"  # noqa: S608
        rest = f"SELECT id, revision, body FROM tasks WHERE revision = ? {of_group} ORDER BY id"  # noqa: S608
        with self._view() as query:
            whole = int(query("SELECT revision FROM standing")[0][0])
            found = query(sql, (after, *values, limit + 1))
            if len(found) > limit:
                whole = int(found[limit - 1][1])
                found = [*(row for row in found if row[1] < whole), *query(rest, (whole, *values))]
            return _with_allocations(query, found), whole

    def allocation(self, allocation_id: str) -> Allocation | None:
        with self._view() as query:
            rows = query("SELECT body FROM allocations WHERE id = ?", (allocation_id,))
        return decode(Allocation, rows[0][0]) if rows else None

    def events(
        self,
        after: int,
        limit: int,
        *,
        subject: str | None = None,
        subject_id: str | None = None,
        group: str | None = None,
    ) -> list[StoredEvent]:
        where: list[str] = ["sequence > ?"]
        values: list[str | int] = [after]
        for column, value in (("subject", subject), ("id", subject_id), ("task_group", group)):
            if value is not None:
                where.append(f"{column} = ?")
                values.append(value)
        sql = f"SELECT sequence, body FROM events WHERE {' AND '.join(where)} ORDER BY sequence LIMIT ?"  # noqa: S608
        with self._view() as query:
            return [StoredEvent(row[0], decode(Event, row[1])) for row in query(sql, (*values, limit))]

    def usage(self, from_ms: int, to_ms: int) -> list[UsageRecord]:
        with self._view() as query:
            found = query("SELECT body FROM usage WHERE to_ms > ? AND from_ms < ?", (from_ms, to_ms))
        return [decode(UsageRecord, row[0]) for row in found]


def _live(query: Query) -> tuple[tuple[Entity, ...], tuple[Allocation, ...], dict[str, int]]:
    """Everything live, the ended allocations of live tasks, and each live task's revision."""
    entities: list[Entity] = []
    for kind, body in query("SELECT kind, body FROM objects ORDER BY kind, id"):
        entities.append(decode(KINDS[kind], body))  # type: ignore[type-var]
    revisions: dict[str, int] = {}
    for task_id, revision, body in query("SELECT id, revision, body FROM tasks WHERE live = 1 ORDER BY id"):
        revisions[task_id] = revision
        entities.append(decode(Task, body))
    closed: list[Allocation] = []
    of_live = "SELECT a.live, a.body FROM tasks t CROSS JOIN allocations a WHERE a.task = t.id AND t.live = 1 ORDER BY a.id"
    for live, body in query(of_live):
        (entities if live else closed).append(decode(Allocation, body))
    return tuple(entities), tuple(closed), revisions


def _with_allocations(query: Query, found: Sequence[Row]) -> list[StoredTask]:
    """Rows of (id, revision, body) with the allocations of each task's last attempt."""
    held: dict[str, list[Allocation]] = defaultdict(list)
    ids = [row[0] for row in found]
    for start in range(0, len(ids), _IDS_MAX):
        some = ids[start : start + _IDS_MAX]
        sql = f"SELECT task, body FROM allocations WHERE task IN ({', '.join('?' * len(some))}) ORDER BY id"  # noqa: S608
        for task_id, body in query(sql, some):
            held[task_id].append(decode(Allocation, body))
    out: list[StoredTask] = []
    for task_id, revision, body in found:
        task = decode(Task, body)
        out.append(StoredTask(task, tuple(a for a in held[task_id] if a.attempt == task.attempt), revision))
    return out


def _conditions(wanted: TaskFilter) -> tuple[list[str], list[Any]]:
    """The filter as SQL conditions with their values."""
    where: list[str] = []
    values: list[Any] = []
    if wanted.statuses:
        if all(not TaskStatus(status).ended for status in wanted.statuses):
            where.append("live = 1")  # Keeps a look at the queue off the whole history.
        where.append(f"status IN ({', '.join('?' * len(wanted.statuses))})")
        values.extend(wanted.statuses)
    columns = ("project", '"user"', "name", "task_group", "service")
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
