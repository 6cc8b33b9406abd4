"""The SQLite file itself: who may open it, how it is opened, and its numbered schema files."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path

from crater_core.errors import StoreUnavailable
from crater_core.store.schema_files import schema_files

BUSY_MS = 200
"""How long a write waits for somebody else's lock (a backup, a shell) before it counts as unavailable."""
CHECK_BYTES_MAX = 256 * 1024**2
"""A larger file is not read through at start; damage in it shows where it is read."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
APPLICATION_ID = 0x43524154
"""Marks the file as Crater's ("CRAT"), so that another program's database is not taken over by mistake."""


def connect(path: Path, durable: bool = True) -> sqlite3.Connection:
    """A connection in autocommit mode, durable on every commit unless the file is only a copy."""
    db = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False, cached_statements=256)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        db.execute("PRAGMA journal_size_limit = 67108864")
        db.execute("PRAGMA temp_store = MEMORY")
    except BaseException:
        db.close()
        raise
    return db


def migrate(path: Path) -> None:
    """Bring the schema up to this version; refuse a file that is damaged, newer, or somebody else's."""
    db = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None)
    try:
        version = _inspect(db, path)
        for number, sql in schema_files("sqlite"):
            if number > version:
                mark = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {number};"
                db.executescript(f"BEGIN IMMEDIATE;\n{sql}\n{mark}\nCOMMIT;")
    except sqlite3.Error as error:
        raise unavailable(path, error) from error
    finally:
        db.close()


def _inspect(db: sqlite3.Connection, path: Path) -> int:
    """The schema's number, read without changing a byte."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    owner = int(db.execute("PRAGMA application_id").fetchone()[0])
    tables = int(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if owner != APPLICATION_ID and (tables or owner or version):
        raise StoreUnavailable(f"{path} is a database of another program; name another file", file=str(path))
    newest = schema_files("sqlite")[-1][0]
    if version > newest:
        raise StoreUnavailable(
            f"{path} was written by a newer version of Crater (schema {version}, this one knows {newest}); upgrade Crater",
            file=str(path),
            schema=version,
        )
    if path.stat().st_size > CHECK_BYTES_MAX:
        return version
    found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
    if found != "ok":
        raise _damaged(path, found.splitlines()[0])
    return version


def unavailable(path: Path, error: sqlite3.Error) -> StoreUnavailable:
    """What SQLite's error means to people: damage needs a backup, everything else may pass."""
    if isinstance(error, sqlite3.DatabaseError) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE:
        return _damaged(path, str(error))
    return StoreUnavailable(f"the store {path} cannot be used now: {error}", file=str(path), reason=str(error))


def _damaged(path: Path, why: str) -> StoreUnavailable:
    return StoreUnavailable(
        f"{path} is not a usable Crater database: {why}. Restore it from a backup, or move it away", file=str(path)
    )


class FileLock:
    """One scheduler per database: an advisory lock beside the file, which the system frees however the process ends."""

    def __init__(self, path: Path) -> None:
        lock_path = path.with_name(path.name + ".lock")
        self._descriptor = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise StoreUnavailable(f"{path} is in use by another scheduler (it holds {lock_path})", file=str(path)) from None
        except OSError as error:
            self.release()
            raise StoreUnavailable(f"{path} cannot be opened: {error.strerror}", file=str(path)) from error

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
