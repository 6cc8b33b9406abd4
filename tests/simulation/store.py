"""The simulated store: what is committed outlives every process. One scheduler owns it, or several share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from simulation.checks import Broken, Ledger
from simulation.loop import VirtualLoop
from simulation.network import NOBODY

from crater_core.errors import StaleRevision, StaleTerm, StoreUnavailable
from crater_core.lifecycle.changes import Changes
from crater_core.store import Committed, MemoryStore, SubmitKey
from crater_core.store.protocol import Commit, Leader

COMMITS_KEPT = 40
"""Few, so that a follower that lags has to load everything again now and then."""
COMMITS_READ_MAX = 10
NO_ANSWER_S = 4.0
"""How long a call takes to find out that the store does not answer."""


class Store(MemoryStore):
    """Each commit is checked before anybody hears of it."""

    def __init__(self, ledger: Ledger, rng: Random) -> None:
        super().__init__()
        self.ledger, self.rng = ledger, rng
        self.broken = False
        self.answers_lost = 0
        """In thousandths: the commit is durable, and its caller hears of a failure."""

    def begin_term(self) -> int:
        term = super().begin_term()
        self.ledger.new_term(term)
        return term

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        if self.broken:
            raise StoreUnavailable("the disk is full")
        taken = [key.key for key in keys if self.find_key(key.user, key.key) is not None]
        if taken and (term, expected_revision) == (self._term, self._revision):
            self.refuse(taken)
        committed = super().commit(changes, expected_revision, term, keys)
        self.ledger.committed(changes, committed.revision, term)
        self.heard(Commit(committed.revision, committed.sequence, changes))
        if self.rng.randrange(1000) < self.answers_lost:
            raise StoreUnavailable("the connection was lost before the answer")
        return committed

    def refuse(self, taken: list[str]) -> None:
        """Who owns a store sees its keys in the same turn, so this must not happen."""
        self.ledger.fail(Broken(f"a submit key leads to one task for ever: {taken}"))

    def heard(self, commit: Commit) -> None:
        """For whoever follows."""


class SharedStore(Store):
    """Implements `SharedStore`, by a clock of its own. A wait is a future: no thread waits here."""

    quick_reads = False

    def __init__(self, ledger: Ledger, rng: Random, loop: VirtualLoop) -> None:
        super().__init__(ledger, rng)
        self._loop = loop
        self._lead: Leader | None = None
        self._until_ms = 0
        self._commits: list[Commit] = []
        self._waiting: dict[asyncio.Future[None], None] = {}

    def leader(self) -> Leader | None:
        left_ms = self._until_ms - self._loop.now_ms()
        return replace(self._lead, left_ms=left_ms) if self._lead is not None and left_ms > 0 else None

    def campaign(self, candidate: str, url: str, lease_ms: int) -> Leader:
        leader = self.leader()
        if leader is None or leader.id == candidate:
            self._lead = Leader(self.begin_term(), candidate, url, lease_ms)
            self._until_ms = self._loop.now_ms() + lease_ms
            self.ledger.say(f"{candidate} leads in term {self._lead.term}")
            self._wake()
        leader = self.leader()
        assert leader is not None, "somebody leads after an election"
        return leader

    def _must_lead(self, term: int) -> Leader:
        if self._lead is None or self._lead.term != term:
            raise StaleTerm("another scheduler has taken over", term=term, now=self._term)
        return self._lead

    def renew(self, term: int) -> None:
        self._until_ms = self._loop.now_ms() + self._must_lead(term).left_ms

    def resign(self, term: int) -> None:
        if self._lead is not None and self._lead.term == term:
            self._lead = None
            self._wake()

    def refuse(self, taken: list[str]) -> None:
        raise StaleRevision(f"somebody else wrote the same: {taken}")

    def heard(self, commit: Commit) -> None:
        self._commits = [*self._commits[-COMMITS_KEPT:], commit]
        self._wake()

    def since(self, revision: int) -> list[Commit] | None:
        found = [commit for commit in self._commits if commit.revision > revision][:COMMITS_READ_MAX]
        if found and found[0].revision == revision + 1:
            return found
        return [] if revision == self._revision else None

    def wait(self, revision: int, timeout_s: float) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self._loop.create_future()
        if revision != self._revision or self._lead is None:
            waiter.set_result(None)
        else:
            self._waiting[waiter] = None
            self._loop.call_later(timeout_s, self._let_go, waiter, context=NOBODY)
        return waiter

    def _let_go(self, waiter: asyncio.Future[None]) -> None:
        self._waiting.pop(waiter, None)
        if not waiter.done():
            waiter.set_result(None)

    def _wake(self) -> None:
        for waiter in list(self._waiting):
            self._let_go(waiter)


class Line:
    """One scheduler's connection to a shared store. While it is cut, every call fails, at once or after a while."""

    quick_reads = False

    def __init__(self, store: SharedStore, rng: Random, is_cut: Callable[[], bool]) -> None:
        self._store, self._rng, self._is_cut = store, rng, is_cut

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def asked(*args: Any, **more: Any) -> Any:
            if self._store.broken or self._is_cut():
                error: Any = StoreUnavailable("the store does not answer")
                error.takes_s = self._rng.choice([0.0, 0.0, NO_ANSWER_S])
                raise error
            return call(*args, **more)

        return asked

    def stage(self, *args: Any) -> Callable[[], Committed]:
        return lambda: self.commit(*args)
