"""The one door to psycopg: a connection that is made when it is needed and made anew after trouble, and the schema."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg

from crater_core.errors import StoreUnavailable
from crater_core.store.schema_files import schema_files

PgConnection = psycopg.Connection[tuple[Any, ...]]
CONNECT_S = 3
SCHEMA = "crater"
_LOCK = 4_374_117
"""The advisory lock under which the schema is brought up to date; any number of our own."""
_SESSION = (
    f"SET search_path = {SCHEMA}",
    # A scheduler that is paused in the middle of a write must not keep its successor waiting for the row.
    "SET idle_in_transaction_session_timeout = '3s'",
    "SET lock_timeout = '5s'",
    "SET client_min_messages = warning",
)


def marked(sql: str) -> Any:
    """With psycopg's marks for values."""
    return sql.replace("?", "%s")


class PgLink:
    """One connection for one thread at a time. An error of the server or the network closes it; the next use opens another."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._db: PgConnection | None = None

    @contextmanager
    def use(self) -> Generator[PgConnection]:
        with self._lock:
            try:
                self._db = self._db or self._connect()
                yield self._db
            except psycopg.Error as error:
                self._drop()
                raise self._unavailable(error) from error
            except BaseException:
                if self._db is not None and self._db.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                    self._drop()
                raise

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _connect(self) -> PgConnection:
        db = psycopg.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            application_name="crater-scheduler",
            # A server that vanished without a word is noticed in seconds, not in hours.
            keepalives_idle=2,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=6_000,
        )
        try:
            for sql in _SESSION:
                db.execute(cast(Any, sql))
        except BaseException:
            db.close()
            raise
        return db

    def _drop(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            with suppress(psycopg.Error):
                db.close()

    def _unavailable(self, error: psycopg.Error) -> StoreUnavailable:
        parts = urlsplit(self._url)
        where = f"{parts.hostname or 'the local socket'}{f':{parts.port}' if parts.port else ''}{parts.path}"
        why = " ".join(str(error).split()) or type(error).__name__
        return StoreUnavailable(f"PostgreSQL at {where} cannot be used now: {why}", store=where, reason=why)


def migrate(db: PgConnection) -> None:
    """Bring the schema up to this version, one scheduler at a time; refuse one that is newer."""
    with db.transaction():
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        db.execute(cast(Any, f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
        db.execute("CREATE TABLE IF NOT EXISTS schema_steps (number integer PRIMARY KEY)")
        row = db.execute("SELECT coalesce(max(number), 0) FROM schema_steps").fetchone()
        version = row[0] if row else 0
        steps = schema_files("postgres")
        if version > steps[-1][0]:
            raise StoreUnavailable(
                f"the database was written by a newer version of Crater (schema {version}, this one knows {steps[-1][0]}); "
                "upgrade Crater",
                schema=version,
            )
        for number, sql in steps:
            if number > version:
                db.execute(cast(Any, sql))
                db.execute("INSERT INTO schema_steps VALUES (%s)", (number,))
