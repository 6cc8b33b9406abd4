"""The embedded store: one SQLite file in WAL mode, written durably, with its schema brought up to date at start."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crater_core.errors import StaleRevision, StaleTerm
from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.usage import UsageRecord
from crater_core.store import sqlite_rows as rows
from crater_core.store.codec import decode
from crater_core.store.protocol import Committed, Loaded, StoredEvent, StoredTask, SubmitKey, TaskFilter
from crater_core.store.sqlite_file import FileLock, connect, migrate, unavailable


@dataclass(slots=True)
class _Reader:
    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: sqlite3.Connection | None = None


class SqliteStore:
    """Implements `Store`. One connection writes, one reads lists, one reads single rows; in WAL mode none waits for another."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._lists, self._points = _Reader(), _Reader()
        self._file_lock = FileLock(path)
        try:
            migrate(path)
            with self._transaction():
                pass
        except BaseException:
            self.close()
            raise

    def _begin(self) -> sqlite3.Connection:
        """Take the writer's lock and begin a transaction. `_end` or `_undo` gives the lock back, whatever happens."""
        self._write_lock.acquire()
        try:
            self._writer = self._writer or connect(self._path)
            self._writer.execute("BEGIN IMMEDIATE")
        except BaseException as error:
            self._undo(error)
            raise
        return self._writer

    def _end(self, db: sqlite3.Connection) -> None:
        """Make the transaction durable."""
        try:
            db.execute("COMMIT")
        except BaseException as error:
            self._undo(error)
            raise
        self._write_lock.release()

    def _undo(self, error: BaseException) -> None:
        """Nothing is written. After an error of SQLite the next write gets a fresh connection: the old one may stay broken."""
        try:
            if self._writer is not None and self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as second:
            error = second
        try:
            if isinstance(error, sqlite3.Error):
                _close(self._writer)
                self._writer = None
                raise unavailable(self._path, error) from error
        finally:
            self._write_lock.release()

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        db = self._begin()
        try:
            yield db
        except BaseException as error:
            self._undo(error)
            raise
        self._end(db)

    @contextmanager
    def _reading(self, reader: _Reader | None = None) -> Generator[sqlite3.Connection]:
        reader = reader or self._lists
        with reader.lock:
            try:
                reader.connection = reader.connection or connect(self._path)
                yield reader.connection
            except sqlite3.Error as error:
                _close(reader.connection)
                reader.connection = None
                raise unavailable(self._path, error) from error

    def begin_term(self) -> int:
        with self._transaction() as db:
            db.execute("UPDATE standing SET term = term + 1")
            return int(db.execute("SELECT term FROM standing").fetchone()[0])

    def load(self) -> Loaded:
        with self._reading() as db:
            db.execute("BEGIN")  # One view of all tables.
            try:
                revision, term, sequence = db.execute("SELECT revision, term, sequence FROM standing").fetchone()
                entities, closed, revisions = rows.read_live(db)
            finally:
                db.execute("ROLLBACK")
        return Loaded(revision, term, sequence, entities, closed, revisions)

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        return self.stage(changes, expected_revision, term, keys)()

    def stage(
        self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()
    ) -> Callable[[], Committed]:
        """Rows are written here and synced in the second part. One thread for the rows: the interpreter's lock changes
        hands at every row, which among busy threads costs more than the rows."""
        encoded = rows.encode_changes(changes, expected_revision + 1)
        db = self._begin()
        try:
            revision, term_now, sequence = db.execute("SELECT revision, term, sequence FROM standing").fetchone()
            if term != term_now:
                raise StaleTerm("another scheduler has taken over", term=term, now=term_now)
            if expected_revision != revision:
                raise StaleRevision("the store has moved on", expected=expected_revision, now=revision)
            rows.write_changes(db, encoded, keys, sequence)
            committed = Committed(revision + 1, sequence + len(changes.events))
            db.execute("UPDATE standing SET revision = ?, sequence = ?", (committed.revision, committed.sequence))
        except BaseException as error:
            self._undo(error)
            raise

        def finish() -> Committed:
            self._end(db)
            return committed

        return finish

    def find_key(self, user: str, key: str) -> SubmitKey | None:
        with self._reading(self._points) as db:
            row = db.execute("SELECT task, digest FROM submit_keys WHERE key = ? AND user = ?", (key, user)).fetchone()
        return SubmitKey(user, key, row[0], bytes(row[1])) if row else None

    def task(self, task_id: str) -> StoredTask | None:
        with self._reading() as db:
            found = db.execute("SELECT id, revision, body FROM tasks WHERE id = ?", (task_id,)).fetchall()
            return next(iter(rows.with_allocations(db, found)), None)

    def tasks(self, wanted: TaskFilter, limit: int, before: str | None = None) -> list[StoredTask]:
        where, values = rows.conditions(wanted)
        if before is not None:
            where.append("id < ?")
            values.append(before)
        sql = f"SELECT id, revision, body FROM tasks {'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY id DESC LIMIT ?"  # noqa: S608
        with self._reading() as db:
            return rows.with_allocations(db, db.execute(sql, (*values, limit)).fetchall())

    def tasks_changed(self, after: int, group: str | None, limit: int) -> tuple[list[StoredTask], int]:
        of_group, values = ("AND task_group = ?", (group,)) if group is not None else ("", ())
        sql = f"SELECT id, revision, body FROM tasks WHERE revision > ? {of_group} ORDER BY revision, id LIMIT ?"  # noqa: S608
        rest = f"SELECT id, revision, body FROM tasks WHERE revision = ? {of_group} ORDER BY id"  # noqa: S608
        with self._reading() as db:
            db.execute("BEGIN")
            try:
                whole = int(db.execute("SELECT revision FROM standing").fetchone()[0])
                found = db.execute(sql, (after, *values, limit + 1)).fetchall()
                if len(found) > limit:
                    whole = int(found[limit - 1][1])
                    found = [row for row in found if row[1] < whole] + db.execute(rest, (whole, *values)).fetchall()
                return rows.with_allocations(db, found), whole
            finally:
                db.execute("ROLLBACK")

    def allocation(self, allocation_id: str) -> Allocation | None:
        with self._reading() as db:
            row = db.execute("SELECT body FROM allocations WHERE id = ?", (allocation_id,)).fetchone()
        return decode(Allocation, row[0]) if row else None

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
        with self._reading() as db:
            return [StoredEvent(row[0], decode(Event, row[1])) for row in db.execute(sql, (*values, limit))]

    def usage(self, from_ms: int, to_ms: int) -> list[UsageRecord]:
        with self._reading() as db:
            found = db.execute("SELECT body FROM usage WHERE to_ms > ? AND from_ms < ?", (from_ms, to_ms)).fetchall()
        return [decode(UsageRecord, row[0]) for row in found]

    def prune(self, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int = 1000) -> int:
        with self._transaction() as db:
            return rows.prune(db, ended_before_ms, tasks_max, usage_before_ms, step)

    def close(self) -> None:
        for connection in (self._writer, self._lists.connection, self._points.connection):
            _close(connection)
        self._writer = self._lists.connection = self._points.connection = None
        self._file_lock.release()


def _close(connection: sqlite3.Connection | None) -> None:
    if connection is not None:
        connection.close()
