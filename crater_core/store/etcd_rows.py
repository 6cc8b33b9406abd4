"""Rows in etcd: what the commits come to, written behind them, so that old commits can be forgotten."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from crater_core.errors import CraterError, StaleTerm
from crater_core.store.etcd_link import EtcdLink, Found, after_prefix, created_at, delete, get, put
from crater_core.store.rows import TABLES, Row, Rows, plain, unpack, unplain

log = logging.getLogger("crater.store")
COMMITS_KEPT = 500
"""How far a follower may lag before it has to load everything again."""
FOLD_EVERY = 100
"""Commits between two times that their rows are written."""
OPS_MAX = 100
"""Below the 128 operations that etcd takes in a transaction."""
BYTES_MAX = 1_000_000
COMPACT_EVERY_S = 300


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the store stands; `changed` is etcd's own revision of this."""

    revision: int
    term: int
    sequence: int
    changed: int

    @classmethod
    def of(cls, found: Found | None) -> Standing:
        if found is None:
            return cls(0, 0, 0, 0)
        revision, term, sequence = json.loads(found.value)
        return cls(revision, term, sequence, found.changed)

    @property
    def body(self) -> bytes:
        return json.dumps([self.revision, self.term, self.sequence]).encode()


class Keys:
    """The names under which everything stands."""

    def __init__(self, prefix: str) -> None:
        base = prefix.encode()
        self.watched = base + b"at/"
        self.standing, self.leader = self.watched + b"standing", self.watched + b"leader"
        self.filling, self.folded = base + b"filling", base + b"folded"
        self._commits, self._parts, self.rows = base + b"commit/", base + b"part/", base + b"row/"
        self.content = (self._commits, self._parts, self.rows)
        self.commits_end = after_prefix(self._commits)

    def commit(self, revision: int) -> bytes:
        return self._commits + b"%016d" % revision

    def part(self, revision: int, number: int) -> bytes:
        return self._parts + b"%016d/%06d" % (revision, number)

    def row(self, table: str, key: Sequence[object]) -> bytes:
        return self.rows + "/".join([table, *(quote(str(part), safe="") for part in key)]).encode()

    def table_of(self, key: bytes) -> str:
        return key[len(self.rows) :].partition(b"/")[0].decode()


class RowKeeper:
    """Folds commits into rows in a thread of its own. All that it does is true of the commits already: a crash loses
    nothing, and doing it twice changes nothing."""

    def __init__(self, link: EtcdLink, keys: Keys) -> None:
        self._link, self._keys = link, keys
        self._folding = threading.Lock()
        self._thread: threading.Thread | None = None
        self._compacted_s = time.monotonic()
        self._compact_at = 0

    def note(self, revision: int, fence: int) -> None:
        """A commit went through; now and then the rows are written."""
        if revision % FOLD_EVERY == 0 and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._fold_quietly, args=(revision, fence), name="etcd-fold", daemon=True)
            self._thread.start()

    def _values(self, rows: Rows) -> dict[bytes, bytes | None]:
        values: dict[bytes, bytes | None] = {}
        for name, found in rows.tables.items():
            for row in found:
                values[self._key_of(name, row)] = _row_bytes(name, row)
        values.update({self._keys.row("objects", gone): None for gone in rows.removed})
        return values

    def _key_of(self, name: str, row: Row) -> bytes:
        table = TABLES[name]
        return self._keys.row(name, [row[table.columns.index(column)] for column in table.key])

    def _fold_quietly(self, upto: int, fence: int) -> None:
        try:
            self.settle(upto, fence)
        except CraterError as error:
            log.info("rows will be written later: %s", error.message)

    def settle(self, upto: int, fence: int) -> None:
        """Write the rows of all commits up to this revision, and forget the commits that nobody needs any more."""
        with self._folding:
            folded = self._folded()
            while folded < upto:
                values: dict[bytes, bytes | None] = {}
                step = min(upto, folded + FOLD_EVERY)
                for found in self._link.scan(self._keys.commit(folded + 1), self._keys.commit(step + 1)):
                    values.update(self._values(unpack(self.joined(found))))
                self._write(values, fence)
                self._guarded([put(self._keys.folded, str(step).encode())], fence)
                folded = step
            oldest = max(0, folded - COMMITS_KEPT)
            self._guarded([delete(self._keys.commit(0), self._keys.commit(oldest + 1))], fence)
            self._guarded([delete(self._keys.part(0, 0), self._keys.part(oldest + 1, 0))], fence)
        self._compact()

    def _write(self, values: dict[bytes, bytes | None], fence: int) -> None:
        ops: list[Any] = []
        size = 0
        for key, value in values.items():
            if ops and (len(ops) == OPS_MAX or size + len(value or b"") > BYTES_MAX):
                self._guarded(ops, fence)
                ops, size = [], 0
            ops.append(delete(key) if value is None else put(key, value))
            size += len(key) + len(value or b"")
        if ops:
            self._guarded(ops, fence)

    def _guarded(self, ops: Sequence[Any], fence: int) -> None:
        """`fence`: the create revision of our election key; 0 writes whoever leads."""
        conditions = [created_at(self._keys.leader, fence)] if fence else []
        if not self._link.txn(conditions, ops).held:
            raise StaleTerm("another scheduler has taken over, or may")

    def _folded(self) -> int:
        found = self._link.get(self._keys.folded)[0]
        return int(found.value) if found is not None else 0

    def _compact(self) -> None:
        """etcd keeps every old version of every key until it is told not to; we have no use for those of minutes ago."""
        if time.monotonic() - self._compacted_s < COMPACT_EVERY_S:
            return
        self._compacted_s = time.monotonic()
        now = self._link.txn((), []).revision
        if self._compact_at:
            self._link.compact(self._compact_at)
        self._compact_at = now

    def forget(self, rows: Iterable[tuple[str, Row]], fence: int) -> None:
        self._write({self._keys.row(table, key): None for table, key in rows}, fence)

    def joined(self, found: Found) -> bytes:
        """A commit's bytes, with its parts if it has any."""
        if found.value[:1] == b"=":
            return found.value[1:]
        revision = int(found.key.rpartition(b"/")[2])
        parts = range(int(found.value[1:]))
        whole = [self._link.get(self._keys.part(revision, number))[0] for number in parts]
        return b"".join(part.value for part in whole if part is not None)

    def read_all(self) -> tuple[int, Iterator[tuple[str, Row]], list[Rows]]:
        """The revision up to which rows are written, the rows, and the commits after it."""
        outcome = self._link.txn((), [get(self._keys.folded)])
        folded = int(outcome.found[0].value) if outcome.found[0] is not None else 0
        found = self._link.scan(self._keys.rows, after_prefix(self._keys.rows), outcome.revision)
        later = self._link.scan(self._keys.commit(folded + 1), self._keys.commits_end, outcome.revision)
        return folded, (self._row(each) for each in found), [unpack(self.joined(each)) for each in later]

    def _row(self, found: Found) -> tuple[str, Row]:
        table = self._keys.table_of(found.key)
        return table, unplain(table, json.loads(found.value))

    def replace_all(self, rows: Iterable[tuple[str, Row]]) -> None:
        for prefix in self._keys.content:
            self._link.txn((), [delete(prefix, after_prefix(prefix))])
        values: dict[bytes, bytes | None] = {}
        for name, row in rows:
            values[self._key_of(name, row)] = _row_bytes(name, row)
            if len(values) == OPS_MAX:
                self._write(values, 0)
                values = {}
        self._write(values, 0)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(5)


def _row_bytes(table: str, row: Row) -> bytes:
    return json.dumps(plain(table, row), separators=(",", ":")).encode()
