"""What a store must do that several schedulers open: one leads, the others follow, and who is late writes nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from crater_core.errors import StaleTerm
from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.history import Event
from crater_core.model.node import Node
from crater_core.model.quota import QuotaPolicy
from crater_core.model.resources import Amounts
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.model.usage import UsageRecord
from crater_core.store import SharedStore, SqliteStore, SubmitKey, TaskFilter
from crater_core.store.etcd import EtcdStore
from crater_core.store.etcd_copy import EtcdCopy
from crater_core.store.postgres import PostgresStore

Open = Callable[[], SharedStore]
LEASE_MS = 2_000
_numbers = count()


def opener(kind: str, request: pytest.FixtureRequest) -> Open:
    if kind == "postgres":
        url = request.getfixturevalue("postgres_server").database()
        return lambda: PostgresStore(url)
    server, prefix = request.getfixturevalue("etcd_server"), f"/{request.node.name}-{next(_numbers)}/"
    return lambda: EtcdStore([server.url], prefix)


@pytest.fixture(params=["postgres", "etcd"])
def opened(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens one and the same store again and again."""
    stores: list[SharedStore] = []
    make = opener(request.param, request)

    def open_one() -> SharedStore:
        stores.append(make())
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def a_task(task_id: str, status: TaskStatus = TaskStatus.QUEUED) -> Task:
    ended_at_ms = 50 if status.ended else None
    return Task(task_id, TaskSpec("job", command=("true",), labels={"a": "b"}), status, 10, 10, ended_at_ms=ended_at_ms)


def an_allocation(status: AllocationStatus = AllocationStatus.RUNNING) -> Allocation:
    return Allocation("a1", "t1", 0, 0, "n1", 1, Amounts(1000), status=status)


def same(found: Iterable[object], wanted: Iterable[object]) -> bool:
    return sorted(map(repr, found)) == sorted(map(repr, wanted))


def put(store: SharedStore, term: int, *entities: object, **more: object) -> None:
    keys = more.pop("keys", ())
    store.commit(Changes(entities, **more), store.load().revision, term, keys)  # type: ignore[arg-type]


def test_one_of_two_leads_and_the_other_knows_where(opened: Open) -> None:
    first, second = opened(), opened()
    ours = first.campaign("a", "http://a", LEASE_MS)
    theirs = second.campaign("b", "http://b", LEASE_MS)
    assert (ours.id, theirs.id, theirs.url, theirs.term) == ("a", "a", "http://a", ours.term)
    assert 0 < theirs.left_ms <= LEASE_MS
    leader = second.leader()
    assert leader is not None
    assert (leader.term, leader.url) == (ours.term, "http://a")


def test_a_leader_that_resigns_is_followed_at_once_in_a_higher_term(opened: Open) -> None:
    first, second = opened(), opened()
    before = first.campaign("a", "http://a", 60_000)
    first.resign(before.term)
    assert first.leader() is None
    after = second.campaign("b", "http://b", 60_000)
    assert after.id == "b"
    assert after.term > before.term


def test_a_leader_that_renews_stays_and_one_that_does_not_is_followed_within_its_lease(opened: Open) -> None:
    first, second = opened(), opened()
    term = first.campaign("a", "http://a", LEASE_MS).term
    until = time.monotonic() + 1.5 * LEASE_MS / 1000
    while time.monotonic() < until:
        first.renew(term)
        assert second.campaign("b", "http://b", LEASE_MS).id == "a"
        time.sleep(0.1)
    began = time.monotonic()
    while second.campaign("b", "http://b", LEASE_MS).id == "a":
        time.sleep(0.05)
    assert time.monotonic() - began < LEASE_MS / 1000 + 1.5  # etcd looks at its leases twice a second.
    with pytest.raises(StaleTerm):
        first.renew(term)


def test_a_leader_that_was_paused_writes_nothing_when_it_wakes(opened: Open) -> None:
    first, second = opened(), opened()
    term = first.campaign("a", "http://a", 60_000).term
    put(first, term, a_task("t1"))
    late = first.stage(Changes((a_task("t2"),)), 1, term)
    second.begin_term()
    for write in (late, lambda: put(first, term, a_task("t3")), lambda: first.prune(10**15, 0, 0, term=term)):
        with pytest.raises(StaleTerm):
            write()
    assert [stored.task.id for stored in second.tasks(TaskFilter(), 10)] == ["t1"]
    assert second.load().revision == 1


def test_a_scheduler_that_died_takes_its_own_lead_up_again_without_waiting(opened: Open) -> None:
    before = opened().campaign("a", "http://a", 60_000)
    after = opened().campaign("a", "http://a", 60_000)
    assert (after.id, after.term) == ("a", before.term + 1)


def test_a_follower_takes_in_every_commit_as_it_was_made(opened: Open) -> None:
    leader, follower = opened(), opened()
    term = leader.campaign("a", "http://a", 60_000).term
    event = Event(1, "task", "t1", "queued")
    put(leader, term, Node("n1"), QuotaPolicy("q"), a_task("t1"), an_allocation(), events=(event,))
    put(leader, term, removed=((QuotaPolicy, "q"),))
    found = follower.since(0)
    assert found is not None
    assert [(commit.revision, commit.sequence) for commit in found] == [(1, 1), (2, 1)]
    assert same(found[0].changes.puts, (Node("n1"), QuotaPolicy("q"), a_task("t1"), an_allocation()))
    assert found[0].changes.events == (event,)
    assert found[1].changes.removed == ((QuotaPolicy, "q"),)
    assert follower.since(2) == []
    assert [stored.task.id for stored in follower.tasks(TaskFilter(labels=(("a", "b"),)), 10)] == ["t1"]


def test_waiting_ends_with_a_commit_and_with_the_leader(opened: Open) -> None:
    leader, follower = opened(), opened()
    term = leader.campaign("a", "http://a", 60_000).term
    for happen in (lambda: put(leader, term, a_task("t1")), lambda: leader.resign(term)):
        revision = follower.load().revision
        timer = threading.Timer(0.3, happen)
        timer.start()
        began = time.monotonic()
        follower.wait(revision, 20)
        assert 0.2 < time.monotonic() - began < 5
        timer.join()
    leader.campaign("a", "http://a", 60_000)
    began = time.monotonic()
    follower.wait(1, 0.2)
    assert time.monotonic() - began < 2


def test_a_follower_that_is_too_far_behind_loads_again(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("postgres", "etcd_rows"):
        monkeypatch.setattr(f"crater_core.store.{module}.COMMITS_KEPT", 10)
    monkeypatch.setattr("crater_core.store.etcd_rows.FOLD_EVERY", 20)
    leader, follower = opened(), opened()
    term = leader.campaign("a", "http://a", 60_000).term
    for n in range(100):
        leader.commit(Changes((a_task(f"t{n:03}"),)), n, term)
    until = time.monotonic() + 10
    while follower.since(1) is not None and time.monotonic() < until:
        time.sleep(0.05)
    assert follower.since(1) is None
    assert len(follower.load().entities) == 100
    assert follower.since(100) == []
    assert len(opened().load().entities) == 100


def test_pruned_history_stays_forgotten_for_whoever_opens_the_store(opened: Open) -> None:
    store = opened()
    term = store.campaign("a", "http://a", 60_000).term
    put(store, term, a_task("t1"), a_task("t2"), keys=[SubmitKey("ann", "k", "t1", b"d")])
    put(store, term, a_task("t1", TaskStatus.FAILED))
    assert store.prune(10**15, 0, 0, term=term) == 1
    again = opened()
    assert [stored.task.id for stored in again.tasks(TaskFilter(), 10)] == ["t2"]
    assert again.find_key("ann", "k") is None
    put(store, term, a_task("t3"))
    assert again.load().revision == 3


@pytest.mark.parametrize("target", ["sqlite", "postgres", "etcd"])
@pytest.mark.parametrize("source", ["sqlite", "postgres", "etcd"])
def test_what_one_kind_of_store_writes_out_another_takes_in(
    source: str, target: str, request: pytest.FixtureRequest, tmp_path
) -> None:
    old = SqliteStore(tmp_path / "old.db") if source == "sqlite" else opener(source, request)()
    record = UsageRecord("a1", "t1", "job", "ml", "ann", None, "n1", Amounts(1000), 0, 10)
    event = Event(1, "task", "t1", "queued", group="g")
    term = old.begin_term()
    old.commit(Changes((Node("n1"), a_task("t1"), an_allocation()), (), (event,), (record,)), 0, term)
    ended = replace(a_task("t0", TaskStatus.FAILED), reason=None)
    old.commit(Changes((ended,)), 1, term, [SubmitKey("ann", "k", "t1", b"\x00\xff")])
    standing, rows = old.dump()
    held = list(rows)
    loaded = old.load()
    old.close()
    new = SqliteStore(tmp_path / "new.db") if target == "sqlite" else opener(target, request)()
    new.commit(Changes((a_task("gone"),)), 0, new.begin_term())
    new.fill(standing, held)
    found = new.load()
    assert (found.revision, found.sequence) == (2, 1)
    assert same(found.entities, loaded.entities)
    assert found.term > loaded.term
    assert new.task("gone") is None
    assert new.find_key("ann", "k") == SubmitKey("ann", "k", "t1", b"\x00\xff")
    assert [stored.event for stored in new.events(0, 10)] == [event]
    assert new.usage(0, 100) == [record]
    new.commit(Changes((a_task("t9"),)), 2, new.begin_term())
    assert [stored.task.id for stored in new.tasks(TaskFilter(labels=(("a", "b"),)), 10)] == ["t9", "t1"]
    new.close()


def test_a_copy_of_a_process_that_was_killed_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "crater-etcd-copy-left"
    left.mkdir()
    (left / "copy.db.lock").touch()
    used, other = EtcdCopy(), EtcdCopy()
    assert not left.exists()
    assert len(list(tmp_path.iterdir())) == 2
    used.close()
    other.close()
