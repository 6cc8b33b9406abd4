"""What every store must do, told once and run on each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crater_core.errors import StaleRevision, StaleTerm
from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.history import Event
from crater_core.model.node import Node
from crater_core.model.past import PastUse
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reservation import Reservation, ReservedPart
from crater_core.model.resources import Amounts
from crater_core.model.service import Service
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.model.usage import UsageRecord
from crater_core.store import MemoryStore, SqliteStore, Store, SubmitKey, TaskFilter
from crater_core.store.etcd import EtcdStore
from crater_core.store.postgres import PostgresStore

Maker = Callable[[], Store]


@pytest.fixture(params=["memory", "sqlite", "postgres", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store
    match request.param:
        case "memory":
            made = MemoryStore()
        case "sqlite":
            made = SqliteStore(tmp_path / "crater.db")
        case "etcd":
            made = EtcdStore([request.getfixturevalue("etcd_server").url], f"/{tmp_path.name}/")
        case _:
            made = PostgresStore(request.getfixturevalue("postgres_server").database())
    yield made
    made.close()


def a_task(task_id: str = "t1", status: TaskStatus = TaskStatus.QUEUED, attempt: int = 0, **spec: object) -> Task:
    ended_at_ms = 50 if status.ended else None
    described = TaskSpec(**{"name": "job", "command": ("true",), **spec})  # type: ignore[arg-type]
    return Task(task_id, described, status, 10, 10, attempt=attempt, ended_at_ms=ended_at_ms)


def an_allocation(name: str = "a1", task: str = "t1", attempt: int = 1, **more: object) -> Allocation:
    return Allocation(name, task, attempt, 0, "n1", 1, Amounts(1000), **more)  # type: ignore[arg-type]


class Writer:
    """Commits one thing after the other, in one term."""

    def __init__(self, store: Store) -> None:
        self.store, self.term, self.revision = store, store.begin_term(), store.load().revision

    def put(self, *entities: object, **more: object) -> None:
        keys = more.pop("keys", ())
        changes = Changes(tuple(entities), **more)  # type: ignore[arg-type]
        self.revision = self.store.commit(changes, self.revision, self.term, keys).revision  # type: ignore[arg-type]


def ids(found: list) -> list[str]:  # type: ignore[type-arg]
    return [stored.task.id for stored in found]


def test_a_new_store_is_empty(store: Store) -> None:
    loaded = store.load()
    assert (loaded.revision, loaded.term, loaded.sequence, loaded.entities) == (0, 0, 0, ())


def test_what_is_committed_is_loaded(store: Store) -> None:
    entities = (
        Node("n1"),
        QuotaPolicy("q", limits=Limits(gpu_milli=4000)),
        Service("s", TaskSpec("s"), 2),
        Reservation("r1", "vision", 5, 9, 2, parts=(ReservedPart("n1", 2),)),
        PastUse("vision", 7, (1.5, -2.25, 1 / 3, 0.0)),
        a_task(),
        an_allocation(),
    )
    Writer(store).put(*entities)
    loaded = store.load()
    assert sorted(map(repr, loaded.entities)) == sorted(map(repr, entities))
    assert loaded.revision == 1
    assert loaded.task_revisions == {"t1": 1}


def test_every_commit_moves_the_revision_by_one(store: Store) -> None:
    writer = Writer(store)
    writer.put(a_task("t1"))
    writer.put(a_task("t2"))
    assert writer.revision == store.load().revision == 2


def test_a_commit_on_an_old_revision_writes_nothing(store: Store) -> None:
    writer = Writer(store)
    writer.put(a_task("t1"))
    with pytest.raises(StaleRevision):
        store.commit(Changes((a_task("t2"),)), 0, writer.term)
    assert store.task("t2") is None
    assert store.load().revision == 1


def test_a_commit_of_an_older_term_writes_nothing(store: Store) -> None:
    writer = Writer(store)
    store.begin_term()
    with pytest.raises(StaleTerm):
        writer.put(a_task("t1"))
    assert store.task("t1") is None


def test_terms_only_grow(store: Store) -> None:
    assert [store.begin_term(), store.begin_term(), store.load().term] == [1, 2, 2]


def test_a_revision_is_the_number_of_commits_whatever_they_hold(store: Store) -> None:
    """More than one transaction of etcd takes, and more than one of its messages holds: still all or nothing."""
    writer = Writer(store)
    many = [a_task(f"t{n:05}", command=("echo", "x" * 500)) for n in range(5_000)]
    writer.put(*many, events=tuple(Event(1, "task", task.id, "queued") for task in many))
    loaded = store.load()
    assert (loaded.revision, len(loaded.entities), loaded.sequence) == (1, 5_000, 5_000)
    assert ids(store.tasks(TaskFilter(), 1)) == ["t04999"]


def test_pruning_in_an_older_term_forgets_nothing(store: Store) -> None:
    writer = Writer(store)
    writer.put(a_task("t1", TaskStatus.FAILED, attempt=1))
    store.begin_term()
    with pytest.raises(StaleTerm):
        store.prune(10**15, 0, 0, term=writer.term)
    assert store.task("t1") is not None


def test_ended_tasks_are_not_loaded_but_can_be_read(store: Store) -> None:
    writer = Writer(store)
    writer.put(a_task(), an_allocation())
    ended = replace(an_allocation(), status=AllocationStatus.SUCCEEDED, ended_at_ms=50)
    writer.put(a_task(status=TaskStatus.SUCCEEDED, attempt=1), ended)
    assert store.load().entities == ()
    stored = store.task("t1")
    assert stored is not None
    assert (stored.task.status, stored.allocations, stored.revision) == (TaskStatus.SUCCEEDED, (ended,), 2)


def test_a_task_is_shown_with_the_allocations_of_its_last_attempt(store: Store) -> None:
    lost = an_allocation("a1", attempt=1, status=AllocationStatus.LOST)
    Writer(store).put(a_task(attempt=2, status=TaskStatus.RUNNING), lost, an_allocation("a2", attempt=2))
    stored = store.task("t1")
    assert stored is not None
    assert [a.id for a in stored.allocations] == ["a2"]
    assert store.allocation("a1") == lost
    assert store.load().closed == (lost,)


def test_removed_entities_are_gone(store: Store) -> None:
    writer = Writer(store)
    writer.put(Node("n1"), QuotaPolicy("q"), Service("s", TaskSpec("s"), 2))
    writer.put(removed=((QuotaPolicy, "q"), (Service, "s"), (Node, "n1")))
    assert store.load().entities == ()


def test_a_key_is_found_with_its_digest(store: Store) -> None:
    writer = Writer(store)
    writer.put(a_task(), keys=[SubmitKey("ann", "k", "t1", b"\x00digest")])
    assert store.find_key("ann", "k") == SubmitKey("ann", "k", "t1", b"\x00digest")
    assert store.find_key("bob", "k") is None
    assert ids(store.tasks(TaskFilter(key="k"), 10)) == ["t1"]


def test_tasks_are_listed_newest_first_a_page_at_a_time(store: Store) -> None:
    Writer(store).put(*[a_task(f"t{n}") for n in range(5)])
    assert ids(store.tasks(TaskFilter(), 3)) == ["t4", "t3", "t2"]
    assert ids(store.tasks(TaskFilter(), 3, before="t2")) == ["t1", "t0"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (TaskFilter(statuses=("queued",)), ["t3", "t2"]),
        (TaskFilter(statuses=("queued", "failed")), ["t3", "t2", "t1"]),
        (TaskFilter(project="ml"), ["t2", "t1"]),
        (TaskFilter(user="ann"), ["t1"]),
        (TaskFilter(name="other"), ["t3"]),
        (TaskFilter(group="g"), ["t2"]),
        (TaskFilter(service="web"), ["t3"]),
        (TaskFilter(labels=(("team", "a"),)), ["t2", "t1"]),
        (TaskFilter(labels=(("team", "a"), ("x", "y"))), ["t1"]),
        (TaskFilter(project="ml", statuses=("queued",)), ["t2"]),
        (TaskFilter(name="' OR 1=1 --"), []),
    ],
)
def test_tasks_are_filtered(store: Store, wanted: TaskFilter, found: list[str]) -> None:
    _fill(store)
    assert ids(store.tasks(wanted, 10)) == found


def _fill(store: Store) -> None:
    writer = Writer(store)
    labels = {"team": "a", "x": "y"}
    writer.put(
        a_task("t1", project="ml", user="ann", labels=labels),
        a_task("t2", project="ml", group="g", labels={"team": "a"}),
        a_task("t3", name="other", service="web"),
    )
    writer.put(a_task("t1", TaskStatus.FAILED, attempt=1, project="ml", user="ann", labels=labels))


def test_a_task_that_is_submitted_and_placed_in_one_commit_keeps_its_labels(store: Store) -> None:
    Writer(store).put(a_task("t1", TaskStatus.ALLOCATED, attempt=1, labels={"a": "b"}), an_allocation())
    assert ids(store.tasks(TaskFilter(labels=(("a", "b"),)), 10)) == ["t1"]


def test_changes_are_read_in_order_since_a_revision(store: Store) -> None:
    writer = Writer(store)
    writer.put(a_task("t1", group="g"))
    writer.put(a_task("t2"))
    writer.put(a_task("t1", TaskStatus.RUNNING, group="g"))
    found, whole = store.tasks_changed(1, None, 10)
    assert (ids(found), whole) == (["t2", "t1"], 3)
    found, whole = store.tasks_changed(0, "g", 10)
    assert (ids(found), whole) == (["t1"], 3)
    assert store.tasks_changed(3, None, 10) == ([], 3)


def test_a_cut_list_of_changes_is_whole_up_to_the_revision_it_says(store: Store) -> None:
    writer = Writer(store)
    writer.put(*[a_task(f"t{n}") for n in range(4)])
    writer.put(a_task("t9"))
    found, whole = store.tasks_changed(0, None, 2)
    assert (ids(found), whole) == (["t0", "t1", "t2", "t3"], 1)


def test_history_is_numbered_and_filtered(store: Store) -> None:
    writer = Writer(store)
    events = (Event(1, "task", "t1", "queued", group="g"), Event(2, "node", "n1", "lost"), Event(3, "task", "t1", "started"))
    writer.put(events=events[:2])
    writer.put(events=events[2:])
    everything = store.events(0, 10)
    assert [(stored.sequence, stored.event) for stored in everything] == list(zip((1, 2, 3), events, strict=True))
    assert [s.sequence for s in store.events(0, 10, subject="task", subject_id="t1")] == [1, 3]
    assert [s.sequence for s in store.events(0, 10, group="g")] == [1]
    assert [s.sequence for s in store.events(1, 1)] == [2]
    assert store.load().sequence == 3


def test_usage_that_overlaps_a_window_is_read(store: Store) -> None:
    def record(name: str, from_ms: int, to_ms: int) -> UsageRecord:
        return UsageRecord(name, "t1", "job", "ml", "ann", None, "n1", Amounts(1000), from_ms, to_ms)

    Writer(store).put(usage=(record("a1", 0, 10), record("a2", 5, 20), record("a3", 30, 40)))
    assert sorted(r.allocation for r in store.usage(10, 30)) == ["a2"]
    assert sorted(r.allocation for r in store.usage(0, 100)) == ["a1", "a2", "a3"]


def test_pruning_forgets_the_oldest_ended_tasks_with_their_story(store: Store) -> None:
    writer = Writer(store)
    event = Event(1, "task", "t1", "queued")
    writer.put(a_task("t1"), a_task("t2"), a_task("t3"), events=(event,), keys=[SubmitKey("ann", "k", "t1", b"d")])
    for name, at_ms in (("t1", 100), ("t2", 200)):
        writer.put(
            replace(a_task(name, TaskStatus.FAILED, attempt=1), ended_at_ms=at_ms),
            an_allocation(f"a-{name}", name, status=AllocationStatus.FAILED),
        )
    assert store.prune(ended_before_ms=150, tasks_max=10, usage_before_ms=0) == 1
    assert store.task("t1") is None
    assert store.allocation("a-t1") is None
    assert store.find_key("ann", "k") is None
    assert store.events(0, 10, subject="task", subject_id="t1") == []
    assert store.prune(ended_before_ms=0, tasks_max=0, usage_before_ms=0) == 1
    assert ids(store.tasks(TaskFilter(), 10)) == ["t3"]
