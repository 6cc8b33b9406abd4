"""What the scheduler needs of a store: everything live at once, commits that are all or nothing, and reads of the past."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from crater_core.lifecycle.changes import Changes
from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.snapshot import Entity
from crater_core.model.task import Task
from crater_core.model.usage import UsageRecord


@dataclass(frozen=True, slots=True)
class SubmitKey:
    """An idempotency key: the user's own name for one submit. `digest` tells the same body from another."""

    user: str
    key: str
    task: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything live at one revision. `closed` are ended allocations of tasks that are still live (members of a gang)."""

    revision: int
    term: int
    sequence: int
    """The number of the last line of history."""
    entities: tuple[Entity, ...] = ()
    closed: tuple[Allocation, ...] = ()
    task_revisions: dict[str, int] = field(default_factory=lambda: {})


@dataclass(frozen=True, slots=True)
class Committed:
    revision: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit as it was made: what a follower takes in. Submit keys stay behind; they are looked up when needed."""

    revision: int
    sequence: int
    changes: Changes


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, in which term, and for how long without another word from it."""

    term: int
    id: str
    url: str
    left_ms: int


@dataclass(frozen=True, slots=True)
class StoredTask:
    """A task with the allocations of its last attempt and the revision of its last change."""

    task: Task
    allocations: tuple[Allocation, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class StoredEvent:
    sequence: int
    event: Event


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """All that are given must hold; `statuses` are alternatives."""

    statuses: tuple[str, ...] = ()
    project: str | None = None
    user: str | None = None
    name: str | None = None
    group: str | None = None
    service: str | None = None
    labels: tuple[tuple[str, str], ...] = ()
    key: str | None = None


class Store(Protocol):
    """Calls may come from several threads. Any of them may raise StoreUnavailable; the same call may work later."""

    @property
    def quick_reads(self) -> bool:
        """Whether `find_key` asks no network, so that an event loop may call it."""
        ...

    def begin_term(self) -> int:
        """Take over: a higher term from here on, under which all later commits must come."""
        ...

    def load(self) -> Loaded: ...

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        """Write all of it durably, or nothing. Entities in `changes` appear once each.

        Raises StaleRevision when somebody else wrote since, and StaleTerm when somebody else took over.
        """
        ...

    def stage(
        self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()
    ) -> Callable[[], Committed]:
        """The quick part of a commit, done now; calling what it gives makes it durable, and may wait for the disk.

        Raises as `commit` does, in either part. Nobody else can write in between, so the second part must follow.
        """
        ...

    def find_key(self, user: str, key: str) -> SubmitKey | None: ...

    def task(self, task_id: str) -> StoredTask | None: ...

    def tasks(self, wanted: TaskFilter, limit: int, before: str | None = None) -> list[StoredTask]:
        """Newest first, with ids below `before`."""
        ...

    def tasks_changed(self, after: int, group: str | None, limit: int) -> tuple[list[StoredTask], int]:
        """Tasks changed after a revision, in the order of their changes, and the revision up to which the list is whole."""
        ...

    def allocation(self, allocation_id: str) -> Allocation | None: ...

    def events(
        self,
        after: int,
        limit: int,
        *,
        subject: str | None = None,
        subject_id: str | None = None,
        group: str | None = None,
    ) -> list[StoredEvent]:
        """Oldest first, with a sequence above `after`."""
        ...

    def usage(self, from_ms: int, to_ms: int) -> list[UsageRecord]:
        """Closed records that overlap the window."""
        ...

    def prune(self, ended_before_ms: int, tasks_max: int, usage_before_ms: int, step: int = 1000, term: int | None = None) -> int:
        """Forget some of the oldest ended tasks with their story, beyond an age or a number; says how many went.

        Raises StaleTerm when `term` is given and over.
        """
        ...

    def close(self) -> None: ...


class SharedStore(Store, Protocol):
    """A store that several schedulers open at one time: one of them leads, the others follow."""

    def campaign(self, candidate: str, url: str, lease_ms: int) -> Leader:
        """Lead, in a new term, when nobody does; says who leads now. An `id` of our own means that it is us."""
        ...

    def renew(self, term: int) -> None:
        """Lead for another lease time. Raises StaleTerm when somebody else leads by now."""
        ...

    def resign(self, term: int) -> None:
        """Let another one lead at once. Does nothing when `term` is over."""
        ...

    def leader(self) -> Leader | None:
        """Who leads now, if anybody does."""
        ...

    def since(self, revision: int) -> list[Commit] | None:
        """Some of the next commits in order, none when there are none; None when they are forgotten: `load` again."""
        ...

    def wait(self, revision: int, timeout_s: float) -> None:
        """Come back when a commit after `revision` is there, when the leader has gone, or when the time is over."""
        ...


class PortableStore(Store, Protocol):
    """A store whose whole content can be written to a file, and read from one by a store of any kind."""

    def leader(self) -> Leader | None:
        """Who uses the store now. None where no two can: it is us."""
        ...

    def dump(self) -> tuple[Loaded, Iterator[tuple[str, tuple[Any, ...]]]]:
        """Where the store stands, and every row with the name of its table, as of one moment."""
        ...

    def fill(self, standing: Loaded, rows: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
        """Replace all that is there, in one step as far as anybody can see. Terms go on growing."""
        ...
