"""What the machine itself takes for the two things that no scheduler can do without: start a program, and commit a row."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from benchmarks.figures import Figure, median, plain

ROUNDS = 200


def rows(directory: Path) -> list[Figure]:
    return [
        plain("yardstick.posix_spawn.ms", median([spawn_ms() for _ in range(ROUNDS)]), "ms"),
        plain("yardstick.sqlite_commit.ms", median(commits_ms(directory, ROUNDS)), "ms"),
    ]


def spawn_ms() -> float:
    """Start /bin/true from this process and wait for its end."""
    start = time.perf_counter()
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return (time.perf_counter() - start) * 1000


def commits_ms(directory: Path, count: int) -> list[float]:
    """One row a commit, write-ahead log, synchronous=FULL: on the disk before it is acknowledged."""
    database = sqlite3.connect(directory / "yardstick.db", isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=full")
    database.execute("create table t (id integer primary key, body text)")
    taken: list[float] = []
    for number in range(count):
        start = time.perf_counter()
        database.execute("insert into t values (?, ?)", (number, "x" * 500))
        taken.append((time.perf_counter() - start) * 1000)
    database.close()
    return taken
