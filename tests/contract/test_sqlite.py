"""What the SQLite store does beside the contract: trouble with its file is said plainly, and passes when the trouble does."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from crater_core.errors import StoreUnavailable
from crater_core.lifecycle.changes import Changes
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.store import SqliteStore
from crater_core.store.schema_files import schema_files


def a_task(task_id: str, text: str = "") -> Task:
    return Task(task_id, TaskSpec("job", command=("echo", text)), TaskStatus.QUEUED, 1, 1)


def commit(store: SqliteStore, *tasks: Task) -> None:
    loaded = store.load()
    store.commit(Changes(tasks), loaded.revision, loaded.term)


def test_what_was_committed_is_there_after_reopening(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "crater.db")
    commit(store, a_task("t1"))
    store.close()
    again = SqliteStore(tmp_path / "crater.db")
    assert again.load().entities == (a_task("t1"),)
    again.close()


def test_a_commit_is_durable_before_it_returns(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "crater.db")
    assert store._writer is not None
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,)
    assert store._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "crater.db"
    path.write_bytes(b"this is not a database at all, not even a small one" * 100)
    with pytest.raises(StoreUnavailable, match=r"crater\.db is not a usable Crater database"):
        SqliteStore(path)


def test_a_damaged_database_is_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "crater.db"
    store = SqliteStore(path)
    commit(store, *[a_task(f"t{n}", "x" * 500) for n in range(200)])
    store.close()
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 20_000] = b"\xff" * 20_000
    path.write_bytes(bytes(data))
    with pytest.raises(StoreUnavailable, match=r"crater\.db is not a usable Crater database"):
        SqliteStore(path)


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "crater.db"
    SqliteStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 999")
    db.close()
    with pytest.raises(StoreUnavailable, match=r"crater.db was written by a newer version .*schema 999.*upgrade Crater"):
        SqliteStore(path)


def test_another_programs_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match="a database of another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_two_schedulers_cannot_use_one_file(tmp_path: Path) -> None:
    first = SqliteStore(tmp_path / "crater.db")
    with pytest.raises(StoreUnavailable, match="in use by another scheduler"):
        SqliteStore(tmp_path / "crater.db")
    first.close()
    SqliteStore(tmp_path / "crater.db").close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=r"crater\.db cannot be opened"):
        SqliteStore(tmp_path / "file" / "crater.db")


def test_a_full_disk_refuses_writes_and_then_works_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "crater.db")
    commit(store, a_task("t1"))
    assert store._writer is not None
    pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnavailable, match="full"):
        commit(store, a_task("t2", "x" * 100_000))
    assert store.load().revision == 1
    assert store.task("t2") is None
    commit(store, a_task("t3", "x" * 100_000))  # A fresh connection has no such bound: the disk has room again.
    assert store.load().revision == 2
    store.close()


def test_somebody_elses_lock_refuses_writes_until_it_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crater_core.store.sqlite_file.BUSY_MS", 50)
    store = SqliteStore(tmp_path / "crater.db")
    other = sqlite3.connect(tmp_path / "crater.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked"):
        commit(store, a_task("t1"))
    assert store.load().revision == 0  # Reads go on.
    other.execute("ROLLBACK")
    commit(store, a_task("t1"))
    other.close()
    store.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_schema_files_are_numbered_without_gaps(kind: str) -> None:
    assert [number for number, _ in schema_files(kind)] == list(range(1, len(schema_files(kind)) + 1))
