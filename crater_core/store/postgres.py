"""The store in PostgreSQL: one row says where it stands and who leads, and every write goes through that row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import psycopg

from crater_core.errors import StaleRevision, StaleTerm
from crater_core.lifecycle.changes import Changes
from crater_core.store.postgres_link import PgConnection, PgLink, marked, migrate
from crater_core.store.protocol import Commit, Committed, Leader, Loaded, SubmitKey
from crater_core.store.rows import TABLES, Row, commit_of, pack, rows_of, unpack
from crater_core.store.sql import Query, SqlReads, fill, prune, select_all, write_rows

COMMITS_KEPT = 2_000
"""How far a follower may lag before it has to load everything again."""
COMMITS_READ_MAX = 200
_FORGET_EVERY = 100
_HELD_UNTIL = "renewed_at + lease_ms * interval '1 ms'"
_FREE = f"(leader IS NULL OR clock_timestamp() NOT BETWEEN renewed_at - lease_ms * interval '1 ms' AND {_HELD_UNTIL})"
"""Nobody leads. A moment of renewal that lies far ahead is a clock that has jumped."""


class PostgresStore(SqlReads):
    """Implements `SharedStore` and `PortableStore`. Connections of their own for what must not wait for each other."""

    quick_reads = False

    def __init__(self, url: str) -> None:
        self._writer, self._lists, self._points, self._ear, self._crown = (PgLink(url) for _ in range(5))
        self._listening: PgConnection | None = None
        self._closing = threading.Event()
        with self._writer.use() as db:
            migrate(db)

    @contextmanager
    def _transaction(self) -> Generator[PgConnection]:
        with self._writer.use() as db, db.transaction():
            yield db

    @contextmanager
    def _election(self) -> Generator[PgConnection]:
        """On a connection of its own: a long commit must not keep a leader from renewing its lead."""
        with self._crown.use() as db, db.transaction():
            yield db

    @contextmanager
    def _view(self, point: bool = False) -> Generator[Query]:
        if point:
            with self._points.use() as db:
                yield _query_on(db)
            return
        with self._lists.use() as db:
            db.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                yield _query_on(db)
            finally:
                if not db.broken:
                    db.execute("ROLLBACK")

    def begin_term(self) -> int:
        with self._transaction() as db:
            term = _one(db, "UPDATE standing SET term = term + 1, leader = NULL RETURNING term")[0]
            db.execute("NOTIFY crater")
            return term

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        return self.stage(changes, expected_revision, term, keys)()

    def stage(
        self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()
    ) -> Callable[[], Committed]:
        """Nothing is done before the second part: every step of it waits for the network."""

        def finish() -> Committed:
            with self._transaction() as db:
                move = "UPDATE standing SET revision = revision + 1, sequence = sequence + ? WHERE term = ? AND revision = ?"
                moved = db.execute(marked(move), (len(changes.events), term, expected_revision))
                if moved.rowcount != 1:
                    raise _stale(_one(db, "SELECT term, revision FROM standing"), term, expected_revision)
                sequence = _one(db, "SELECT sequence FROM standing")[0] - len(changes.events)
                rows = rows_of(changes, expected_revision + 1, sequence, keys)
                try:
                    write_rows(_many_on(db), rows)
                except psycopg.errors.UniqueViolation as error:
                    # A submit key that the caller could not know of yet: it has to look again.
                    raise StaleRevision(f"somebody else wrote the same: {error.diag.message_detail}") from error
                body = pack(rows)
                db.execute(marked("INSERT INTO commits (revision, body) VALUES (?, ?)"), (rows.revision, body))
                if rows.revision % _FORGET_EVERY == 0:
                    db.execute(marked("DELETE FROM commits WHERE revision <= ?"), (rows.revision - COMMITS_KEPT,))
                db.execute("NOTIFY crater")
                return Committed(rows.revision, rows.sequence)

        return finish

    def prune(self, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int = 1000, term: int | None = None) -> int:
        with self._transaction() as db:
            term_now, revision = _one(db, "SELECT term, revision FROM standing FOR UPDATE")
            if term is not None and term != term_now:
                raise _stale((term_now, revision), term, revision)
            return prune(_query_on(db), _many_on(db), (ended_before_ms, tasks_max, usage_before_ms, step))

    # Leading and following.

    def campaign(self, candidate: str, url: str, lease_ms: int) -> Leader:
        take = f"""
            UPDATE standing SET term = term + 1, leader = ?, leader_url = ?, lease_ms = ?, renewed_at = clock_timestamp()
            WHERE {_FREE} OR leader = ? RETURNING term
        """  # noqa: S608
        with self._election() as db:
            won = db.execute(marked(take), (candidate, url, lease_ms, candidate)).fetchone()
            if won is not None:
                db.execute("NOTIFY crater")
                return Leader(won[0], candidate, url, lease_ms)
            leader = _leader(db)
        return leader or self.campaign(candidate, url, lease_ms)  # Its time ran out between the two questions.

    def renew(self, term: int) -> None:
        with self._election() as db:
            sql = "UPDATE standing SET renewed_at = clock_timestamp() WHERE term = ? AND leader IS NOT NULL"
            if db.execute(marked(sql), (term,)).rowcount != 1:
                raise _stale(_one(db, "SELECT term, revision FROM standing"), term, 0)

    def resign(self, term: int) -> None:
        with self._election() as db:
            db.execute(marked("UPDATE standing SET leader = NULL WHERE term = ?"), (term,))
            db.execute("NOTIFY crater")

    def leader(self) -> Leader | None:
        with self._crown.use() as db:
            return _leader(db)

    def since(self, revision: int) -> list[Commit] | None:
        with self._view() as query:
            sql = "SELECT body FROM commits WHERE revision > ? ORDER BY revision LIMIT ?"
            found = [unpack(row[0]) for row in query(sql, (revision, COMMITS_READ_MAX))]
            now = query("SELECT revision FROM standing")[0][0]
        if found and found[0].revision == revision + 1:
            return [commit_of(rows) for rows in found]
        return [] if now == revision else None

    def wait(self, revision: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        with self._ear.use() as db:
            if db is not self._listening:
                db.execute("LISTEN crater")
                self._listening = db
            while not self._closing.is_set():
                now, leader = _one(db, "SELECT revision, leader FROM standing")
                left_s = until - time.monotonic()
                if now != revision or leader is None or left_s <= 0:
                    return
                for _ in db.notifies(timeout=min(left_s, 0.5), stop_after=1):
                    pass

    # All of it at once.

    def dump(self) -> tuple[Loaded, Iterator[tuple[str, Row]]]:
        with self._view() as query:
            revision, term, sequence = query("SELECT revision, term, sequence FROM standing")[0]
            found = {table.name: query(select_all(table)) for table in TABLES.values()}
        return Loaded(revision, term, sequence), ((name, row) for name, rows in found.items() for row in rows)

    def fill(self, standing: Loaded, rows: Iterable[tuple[str, Row]]) -> None:
        with self._transaction() as db:
            fill(_many_on(db), rows)
            db.execute("DELETE FROM commits")
            sql = "UPDATE standing SET revision = ?, sequence = ?, term = greatest(term, ?) + 1, leader = NULL"
            db.execute(marked(sql), (standing.revision, standing.sequence, standing.term))
            db.execute("NOTIFY crater")

    def close(self) -> None:
        self._closing.set()
        for link in (self._ear, self._writer, self._lists, self._points, self._crown):
            link.close()


def _query_on(db: PgConnection) -> Query:
    def query(sql: str, values: Sequence[Any] = ()) -> Sequence[Row]:
        if any(isinstance(value, str) and "\0" in value for value in values):
            return []  # No text of PostgreSQL's holds this character, so nothing can be found by it.
        return db.execute(marked(sql), values).fetchall()

    return query


def _many_on(db: PgConnection) -> Callable[[str, Sequence[Row]], object]:
    def many(sql: str, rows: Sequence[Row]) -> None:
        with db.cursor() as cursor:
            cursor.executemany(marked(sql), rows)

    return many


def _one(db: PgConnection, sql: str) -> Row:
    row = db.execute(cast(Any, sql)).fetchone()
    assert row is not None, "standing has one row"
    return row


def _leader(db: PgConnection) -> Leader | None:
    left = f"extract(epoch FROM {_HELD_UNTIL} - clock_timestamp()) * 1000"
    sql = f"SELECT term, leader, leader_url, {left} FROM standing WHERE NOT {_FREE}"  # noqa: S608
    row = db.execute(cast(Any, sql)).fetchone()
    return Leader(row[0], row[1], row[2], max(0, int(row[3]))) if row is not None else None


def _stale(now: Row, term: int, expected_revision: int) -> StaleTerm | StaleRevision:
    if now[0] != term:
        return StaleTerm("another scheduler has taken over", term=term, now=now[0])
    return StaleRevision("the store has moved on", expected=expected_revision, now=now[1])
