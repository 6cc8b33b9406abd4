"""A copy of what etcd holds, in a SQLite file that lasts as long as this process: it answers the reads."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from crater_core.store.protocol import Loaded
from crater_core.store.rows import Row, Rows
from crater_core.store.sql import Query, prune
from crater_core.store.sqlite import SqliteStore, query_on

_PREFIX = "crater-etcd-copy-"


class EtcdCopy:
    """Never ahead of etcd. Threads may read while one writes."""

    def __init__(self) -> None:
        _remove_left_behind(Path(tempfile.gettempdir()))
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._store = SqliteStore(self._folder / "copy.db", durable=False)
        self.revision = 0

    @contextmanager
    def view(self, point: bool) -> Generator[Query]:
        with self._store._view(point) as query:  # pyright: ignore[reportPrivateUsage]
            yield query

    def apply(self, commits: Sequence[Rows]) -> None:
        """Take in commits, in order. One that was taken in before does no harm."""
        if commits:
            self._store.replay(commits)
            self.revision = commits[-1].revision

    def stand(self, revision: int, term: int, sequence: int) -> None:
        with self._store.transaction() as db:
            db.execute("UPDATE standing SET revision = ?, term = ?, sequence = ?", (revision, term, sequence))

    def rebuild(self, revision: int, rows: Iterable[tuple[str, Row]], later: Sequence[Rows]) -> None:
        """Begin anew: with the rows as of a revision, and the commits after it."""
        self._store.fill(Loaded(revision, 0, 0), rows)
        self.revision = revision
        self.apply(later)

    def dump(self) -> tuple[Loaded, Iterator[tuple[str, Row]]]:
        return self._store.dump()

    def doomed(self, bounds: tuple[int, int, int, int]) -> list[tuple[str, Row]]:
        """Keys of the rows that `prune` with these bounds would forget, with their tables."""
        ended_before_ms, tasks_max, usage_before_ms, step = bounds
        with self.view(False) as query:
            ended = int(query("SELECT count(*) FROM tasks WHERE live = 0")[0][0])
            oldest = query("SELECT id, ended_at_ms FROM tasks WHERE live = 0 ORDER BY ended_at_ms, id LIMIT ?", (step,))
            found: list[tuple[str, Row]] = []
            for n, (task, at_ms) in enumerate(oldest):
                if n < ended - tasks_max or at_ms < ended_before_ms:
                    for table, sql in (
                        ("labels", "SELECT name, value, task FROM labels WHERE task = ?"),
                        ("submit_keys", 'SELECT key, "user" FROM submit_keys WHERE task = ?'),
                        ("allocations", "SELECT id FROM allocations WHERE task = ?"),
                        ("events", "SELECT sequence FROM events WHERE subject = 'task' AND id = ?"),
                        ("tasks", "SELECT id FROM tasks WHERE id = ?"),
                    ):
                        found += [(table, row) for row in query(sql, (task,))]
            old = query("SELECT sequence FROM events WHERE at_ms < ? AND subject <> 'task'", (ended_before_ms,))
            found += [("events", row) for row in old]
            found += [("usage", row) for row in query("SELECT allocation FROM usage WHERE to_ms < ?", (usage_before_ms,))]
        return found

    def prune(self, bounds: tuple[int, int, int, int]) -> int:
        with self._store.transaction() as db:
            return prune(query_on(db), db.executemany, bounds)

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _remove_left_behind(place: Path) -> None:
    """Copies of processes that were killed: nobody holds their lock any more."""
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError), (folder / "copy.db.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
