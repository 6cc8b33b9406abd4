"""The embedded store: one SQLite file in WAL mode, written durably, with its schema brought up to date at start."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crater_core.errors import StaleRevision, StaleTerm
from crater_core.lifecycle.changes import Changes
from crater_core.store.protocol import Committed, Leader, Loaded, SubmitKey
from crater_core.store.rows import TABLES, Row, Rows, rows_of
from crater_core.store.sql import REMOVE, Query, SqlReads, fill, prune, replace_statement, select_all, write_rows
from crater_core.store.sqlite_file import FileLock, connect, migrate, unavailable


@dataclass(slots=True)
class _Reader:
    lock: threading.Lock = field(default_factory=threading.Lock)
    connection: sqlite3.Connection | None = None


class SqliteStore(SqlReads):
    """Implements `PortableStore`. A connection to write, one for lists, one for single rows; with a WAL none waits."""

    quick_reads = True

    def __init__(self, path: Path, durable: bool = True) -> None:
        self._path, self._durable = path, durable
        self._write_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        self._lists, self._points = _Reader(), _Reader()
        self._file_lock = FileLock(path)
        try:
            migrate(path)
            with self.transaction():
                pass
        except BaseException:
            self.close()
            raise

    def _begin(self) -> sqlite3.Connection:
        """Take the writer's lock and begin a transaction. `_end` or `_undo` gives the lock back, whatever happens."""
        self._write_lock.acquire()
        try:
            self._writer = self._writer or connect(self._path, self._durable)
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
    def transaction(self) -> Generator[sqlite3.Connection]:
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
                reader.connection = reader.connection or connect(self._path, self._durable)
                yield reader.connection
            except sqlite3.Error as error:
                _close(reader.connection)
                reader.connection = None
                raise unavailable(self._path, error) from error

    @contextmanager
    def _view(self, point: bool = False) -> Generator[Query]:
        if point:
            with self._reading(self._points) as db:
                yield query_on(db)
            return
        with self._reading(self._lists) as db:
            db.execute("BEGIN")
            try:
                yield query_on(db)
            finally:
                db.execute("ROLLBACK")

    def begin_term(self) -> int:
        with self.transaction() as db:
            db.execute("UPDATE standing SET term = term + 1")
            return int(db.execute("SELECT term FROM standing").fetchone()[0])

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        return self.stage(changes, expected_revision, term, keys)()

    def stage(
        self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()
    ) -> Callable[[], Committed]:
        """Rows are written here and synced in the second part. One thread for the rows: the interpreter's lock changes
        hands at every row, which among busy threads costs more than the rows."""
        db = self._begin()
        try:
            revision, term_now, sequence = db.execute("SELECT revision, term, sequence FROM standing").fetchone()
            if term != term_now:
                raise StaleTerm("another scheduler has taken over", term=term, now=term_now)
            if expected_revision != revision:
                raise StaleRevision("the store has moved on", expected=expected_revision, now=revision)
            rows = rows_of(changes, revision + 1, sequence, keys)
            write_rows(db.executemany, rows)
            committed = Committed(rows.revision, rows.sequence)
            db.execute("UPDATE standing SET revision = ?, sequence = ?", (committed.revision, committed.sequence))
        except BaseException as error:
            self._undo(error)
            raise

        def finish() -> Committed:
            self._end(db)
            return committed

        return finish

    def prune(self, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int = 1000, term: int | None = None) -> int:
        with self.transaction() as db:
            query = query_on(db)
            term_now = query("SELECT term FROM standing")[0][0]
            if term not in (None, term_now):
                raise StaleTerm("another scheduler has taken over", term=term, now=term_now)
            return prune(query, db.executemany, (ended_before_ms, tasks_max, usage_before_ms, step))

    def leader(self) -> Leader | None:
        return None  # Whoever has the file open is alone with it.

    def dump(self) -> tuple[Loaded, Iterator[tuple[str, Row]]]:
        with self._view() as query:
            revision, term, sequence = query("SELECT revision, term, sequence FROM standing")[0]
            found = {table.name: query(select_all(table)) for table in TABLES.values()}
        return Loaded(revision, term, sequence), ((name, row) for name, rows in found.items() for row in rows)

    def fill(self, standing: Loaded, rows: Iterable[tuple[str, Row]]) -> None:
        with self.transaction() as db:
            fill(db.executemany, rows)
            sql = "UPDATE standing SET revision = ?, sequence = ?, term = max(term, ?) + 1"
            db.execute(sql, (standing.revision, standing.sequence, standing.term))

    def replay(self, commits: Sequence[Rows]) -> None:
        """Take in commits that another store has made, in order; one that is here already does no harm."""
        with self.transaction() as db:
            for rows in commits:
                for name, found in rows.tables.items():
                    db.executemany(replace_statement(TABLES[name]), found)
                db.executemany(REMOVE, rows.removed)
                db.execute("UPDATE standing SET revision = ?, sequence = ?", (rows.revision, rows.sequence))

    def close(self) -> None:
        for connection in (self._writer, self._lists.connection, self._points.connection):
            _close(connection)
        self._writer = self._lists.connection = self._points.connection = None
        self._file_lock.release()


def _close(connection: sqlite3.Connection | None) -> None:
    if connection is not None:
        connection.close()


def query_on(db: sqlite3.Connection) -> Query:
    def query(sql: str, values: Sequence[Any] = ()) -> Sequence[Row]:
        return db.execute(sql, values).fetchall()

    return query
