"""The store in etcd: every commit is one transaction that puts the commit whole; a copy in SQLite answers the reads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from crater_core.errors import StaleRevision, StaleTerm, StoreUnavailable
from crater_core.lifecycle.changes import Changes
from crater_core.store.etcd_access import EtcdAccess
from crater_core.store.etcd_copy import EtcdCopy
from crater_core.store.etcd_link import EtcdLink, Found, changed_at, created_at, delete, get, put
from crater_core.store.etcd_rows import Keys, RowKeeper, Standing
from crater_core.store.protocol import Commit, Committed, Leader, Loaded, SubmitKey
from crater_core.store.rows import Row, Rows, commit_of, pack, rows_of, unpack
from crater_core.store.sql import Query, SqlReads

PART_BYTES = 1_000_000
"""What one key holds of a commit: etcd takes 1.5 MB a request."""
COMMITS_READ_MAX = 100


class EtcdStore(SqlReads):
    """Implements `SharedStore` and `PortableStore`. docs/decisions/0007 tells the layout.

    The copy may lag behind etcd (a standby's does, by a moment); a commit goes through only from the newest state.
    """

    quick_reads = True

    def __init__(self, endpoints: Sequence[str], prefix: str = "/crater/", access: EtcdAccess | None = None) -> None:
        self._link = EtcdLink(endpoints, access)
        self._keys = Keys(prefix)
        self._copy = EtcdCopy()
        self._lock = threading.RLock()
        self._standing = Standing(0, 0, 0, 0)
        self._in_doubt = True
        """Whether etcd may hold more than the copy: at the start, and after a commit without an answer."""
        self._held: dict[int, tuple[int, int]] = {}
        """By term of our own: the create revision of the election's key, and its lease."""
        self._keeper = RowKeeper(self._link, self._keys)
        self._news = threading.Condition()
        self._rung = 0
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            self._sync()
        except BaseException:
            self.close()
            raise

    # Reading.

    @contextmanager
    def _view(self, point: bool = False) -> Generator[Query]:
        with self._copy.view(point) as query:
            yield query

    def load(self) -> Loaded:
        self._sync()
        return super().load()

    def _sync(self) -> None:
        """Bring the copy up to what etcd has."""
        with self._lock:
            while (standing := self._read_standing()).revision != self._copy.revision:
                # Commits alone would bring back what was pruned: a new copy begins with the rows.
                missing = self._commits_after(self._copy.revision, standing.revision) if self._copy.revision else None
                if missing is None:
                    self._copy.rebuild(*self._keeper.read_all())
                else:
                    self._copy.apply(missing)
            self._take(standing)

    def _take(self, standing: Standing) -> None:
        self._standing = standing
        self._copy.stand(standing.revision, standing.term, standing.sequence)
        self._in_doubt = False

    def _read_standing(self) -> Standing:
        found, filling = self._link.get(self._keys.standing, self._keys.filling)
        if filling is not None:
            raise StoreUnavailable("a restore of this store was interrupted; run `crater restore --force` again")
        return Standing.of(found)

    def _commits_after(self, revision: int, upto: int) -> list[Rows] | None:
        """All of them in order; None when some are forgotten."""
        out: list[Rows] = []
        while revision < upto:
            page = self._page_after(revision)
            if not page or page[0].revision != revision + 1:
                return None
            out += page
            revision = page[-1].revision
        return out

    def _page_after(self, revision: int) -> list[Rows]:
        start, end = self._keys.commit(revision + 1), self._keys.commits_end
        return [self._whole(found) for found in self._link.scan(start, end, limit=COMMITS_READ_MAX)]

    def _whole(self, found: Found) -> Rows:
        return unpack(self._keeper.joined(found))

    # Writing.

    def begin_term(self) -> int:
        with self._lock:
            self._link.txn((), [delete(self._keys.leader)])
            return self._lead(json.dumps({"id": "", "url": ""}).encode(), 0)

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        return self.stage(changes, expected_revision, term, keys)()

    def stage(
        self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()
    ) -> Callable[[], Committed]:
        """Nothing is done before the second part: every step of it waits for the network."""

        def finish() -> Committed:
            with self._lock:
                if self._in_doubt:
                    self._sync()
                if expected_revision != self._standing.revision or any(self.find_key(key.user, key.key) for key in keys):
                    raise StaleRevision("the store has moved on", expected=expected_revision, now=self._standing.revision)
                rows = rows_of(changes, expected_revision + 1, self._standing.sequence, keys)
                self._write(rows, term)
                self._copy.apply([rows])
                self._keeper.note(rows.revision, self._fence(term))
                return Committed(rows.revision, rows.sequence)

        return finish

    def _write(self, rows: Rows, term: int) -> None:
        fence = self._fence(term)
        body = self._parted(pack(rows), rows.revision, fence, term)
        standing = Standing(rows.revision, term, rows.sequence, 0)
        then = [put(self._keys.standing, standing.body), put(self._keys.commit(rows.revision), body)]
        held = [created_at(self._keys.leader, fence), changed_at(self._keys.standing, self._standing.changed)]
        self._in_doubt = True
        outcome = self._link.txn(held, then, [get(self._keys.leader), get(self._keys.standing)])
        if not outcome.held:
            self._refuse(outcome.found, term, fence)
        self._standing = Standing(rows.revision, term, rows.sequence, outcome.revision)
        self._in_doubt = False

    def _refuse(self, found: list[Found | None], term: int, fence: int) -> None:
        leader, standing = found
        now = Standing.of(standing)
        if leader is None or leader.created != fence:
            raise StaleTerm("another scheduler has taken over, or may", term=term, now=now.term)
        self._sync()
        raise StaleRevision("the store has moved on", expected=self._standing.revision, now=now.revision)

    def _parted(self, body: bytes, revision: int, fence: int, term: int) -> bytes:
        """What stands under the commit's key: the commit itself, or how many parts were put beside it before."""
        if len(body) <= PART_BYTES:
            return b"=" + body
        parts = [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
        for number, part in enumerate(parts):
            then = [put(self._keys.part(revision, number), part)]
            outcome = self._link.txn([created_at(self._keys.leader, fence)], then, [get(self._keys.leader)])
            if not outcome.held:
                raise StaleTerm("another scheduler has taken over, or may", term=term)
        return b"+" + str(len(parts)).encode()

    def _fence(self, term: int) -> int:
        held = self._held.get(term)
        if held is None or term != self._standing.term:
            raise StaleTerm("another scheduler has taken over", term=term, now=self._standing.term)
        return held[0]

    def prune(self, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int = 1000, term: int | None = None) -> int:
        with self._lock:
            self._sync()
            fence = self._fence(self._standing.term if term is None else term)
            self._keeper.settle(self._standing.revision, fence)  # No commit that would bring them back may be left to read.
            bounds = (ended_before_ms, tasks_max, usage_before_ms, step)
            self._keeper.forget(self._copy.doomed(bounds), fence)
            return self._copy.prune(bounds)

    # Leading and following.

    def campaign(self, candidate: str, url: str, lease_ms: int) -> Leader:
        while True:
            leader = self._leader()
            if leader is not None and leader.id != candidate:
                return leader
            with self._lock:
                old = self._link.get(self._keys.leader)[0]
                if old is not None and _says(old)["id"] in ("", candidate):
                    # Nobody's, or our own from before a crash.
                    self._link.txn([created_at(self._keys.leader, old.created)], [delete(self._keys.leader)])
                lease = self._link.grant(max(1, -(-lease_ms // 1000)))
                try:
                    term = self._lead(json.dumps({"id": candidate, "url": url}).encode(), lease)
                except StaleTerm:  # Another one was quicker.
                    self._link.revoke(lease)
                    continue
                return Leader(term, candidate, url, lease_ms)

    def _lead(self, words: bytes, lease: int) -> int:
        """Take the election's key, which must be free, and begin a term."""
        took = self._link.txn([created_at(self._keys.leader, 0)], [put(self._keys.leader, words, lease)])
        if not took.held:
            raise StaleTerm("another scheduler has taken over")
        fence = took.revision
        self._sync()
        while True:
            now = self._standing
            ours = Standing(now.revision, now.term + 1, now.sequence, 0)
            held = [created_at(self._keys.leader, fence), changed_at(self._keys.standing, now.changed)]
            outcome = self._link.txn(held, [put(self._keys.standing, ours.body)], [get(self._keys.leader)])
            if outcome.held:
                break
            if outcome.found[0] is None or outcome.found[0].created != fence:
                raise StaleTerm("another scheduler has taken over")
            self._sync()  # The last commit of the one before came in between.
        self._take(Standing(ours.revision, ours.term, ours.sequence, outcome.revision))
        self._held = {ours.term: (fence, lease)}
        return ours.term

    def renew(self, term: int) -> None:
        fence, lease = self._held.get(term, (0, 0))
        if not lease or not self._link.keep_alive(lease):
            raise StaleTerm("the time of this leader is over", term=term)
        found = self._link.get(self._keys.leader)[0]
        if found is None or found.created != fence:
            raise StaleTerm("another scheduler has taken over", term=term)

    def resign(self, term: int) -> None:
        fence, lease = self._held.pop(term, (0, 0))
        if fence:
            self._link.txn([created_at(self._keys.leader, fence)], [delete(self._keys.leader)])
        if lease:
            self._link.revoke(lease)

    def leader(self) -> Leader | None:
        return self._leader()

    def _leader(self) -> Leader | None:
        found, standing = self._link.get(self._keys.leader, self._keys.standing)
        if found is None or not _says(found)["id"]:
            return None
        left_s = self._link.seconds_left(found.lease) if found.lease else 0
        return Leader(Standing.of(standing).term, _says(found)["id"], _says(found)["url"], max(0, left_s) * 1000)

    def since(self, revision: int) -> list[Commit] | None:
        page = self._page_after(revision)
        with self._lock:
            now = self._read_standing()
            if not page:
                if now.revision == revision:
                    self._take(now) if self._copy.revision == revision else self._sync()
                    return []
                return None
            if page[0].revision != revision + 1:
                return None
            new = [rows for rows in page if rows.revision > self._copy.revision]
            if new and new[0].revision != self._copy.revision + 1:
                self._sync()
            elif new:
                self._copy.apply(new)
            self._in_doubt = True  # Whoever writes next looks where etcd stands.
        return [commit_of(rows) for rows in page]

    def wait(self, revision: int, timeout_s: float) -> None:
        self._watch()
        until = time.monotonic() + timeout_s
        while not self._ended.is_set():
            with self._news:
                rung = self._rung
            standing, leader = self._link.get(self._keys.standing, self._keys.leader)
            if leader is None or Standing.of(standing).revision != revision:
                return
            with self._news:
                if not self._news.wait_for(lambda rung=rung: self._rung != rung, min(0.5, until - time.monotonic())):
                    if time.monotonic() >= until:
                        return
                    continue

    def _watch(self) -> None:
        if self._watcher is None:

            def ring() -> None:
                with self._news:
                    self._rung += 1
                    self._news.notify_all()

            arguments = (self._keys.watched, ring, self._ended)
            self._watcher = threading.Thread(target=self._link.watch, args=arguments, name="etcd-watch", daemon=True)
            self._watcher.start()

    # All of it at once.

    def dump(self) -> tuple[Loaded, Iterator[tuple[str, Row]]]:
        self._sync()
        return self._copy.dump()

    def fill(self, standing: Loaded, rows: Iterable[tuple[str, Row]]) -> None:
        with self._lock:
            self._link.txn((), [put(self._keys.filling, b"1")])
            before = Standing.of(self._link.get(self._keys.standing)[0])
            self._keeper.replace_all(rows)
            now = Standing(standing.revision, max(standing.term, before.term) + 1, standing.sequence, 0)
            then = [put(self._keys.standing, now.body), put(self._keys.folded, str(now.revision).encode())]
            self._link.txn((), [*then, delete(self._keys.filling), delete(self._keys.leader)])
            self._held.clear()
            self._copy.rebuild(*self._keeper.read_all())
            self._sync()

    def close(self) -> None:
        self._ended.set()
        with self._news:
            self._news.notify_all()
        self._keeper.close()
        if self._watcher is not None:
            self._watcher.join(3)
        self._link.close()
        self._copy.close()


def _says(found: Found) -> dict[str, Any]:
    return json.loads(found.value)
