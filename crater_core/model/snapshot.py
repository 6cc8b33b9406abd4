"""Everything a decision sees, at one revision.

A snapshot is read by the pure functions and moved on only by its owner, with `advance`, between two decisions. That keeps
a step as cheap as the change it makes, at any size of cluster.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from crater_core.model.allocation import Allocation
from crater_core.model.node import Node
from crater_core.model.past import PastUse
from crater_core.model.prices import PriceTable
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reservation import Reservation
from crater_core.model.resources import TypicalRequest
from crater_core.model.runtimes import RunTimes
from crater_core.model.service import Service
from crater_core.model.task import Task, TaskStatus

Entity = Node | Task | Allocation | QuotaPolicy | Service | PastUse | Reservation


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of scheduler.yaml that decisions depend on."""

    strategy: str = "best_fit"
    pool_strategies: dict[str, str] = field(default_factory=lambda: {})
    heartbeat_timeout_ms: int = 30_000
    attempts_max: int = 5
    """A bound on attempts no policy can pass."""
    cycle_tasks_max: int = 10_000
    """How many queued tasks one cycle looks at."""
    passing: str = "backfill"
    """How later tasks may pass one that has no room: "backfill" (not if that delays it), "free" (always), "none"."""
    reservations_max: int = 8
    """How many blocked tasks have room kept for them at one time."""
    hold_after_ms: int = 600_000
    """A blocked task that has waited so long, and whose start cannot be foretold, has a node emptied for it."""
    preempt_min_run_ms: int = 60_000
    """A task is not preempted before it has run so long."""
    reclaim_after_ms: int = 0
    """A task waits so long before borrowers are stopped to give back what its policy is guaranteed."""
    preemptions_max: int = 3
    """A task is not preempted more often than this."""
    foretell: bool = True
    """Whether tasks without a time limit are expected to run as long as others of their kind did."""
    short_first_milli: int = 0
    """Among tasks of one project and priority, one counts as so many thousandths of its expected run time younger than it is."""
    project_weights: dict[str, int] = field(default_factory=lambda: {})
    """Thousandths; 1000 where a project is not named. Twice the weight deserves twice the share."""
    fair_share_half_life_ms: int = 7 * 86_400_000
    """How long ago use counts half in a project's share; 0: only what it holds now counts."""
    raise_after_ms: int = 43_200_000
    """Each so long of waiting makes a task's priority count 10 more; 0: never."""
    workload: tuple[TypicalRequest, ...] = ()
    """What tasks usually ask for, most frequent first: what `fragmentation_aware` keeps room for. Empty: a general mix."""


@dataclass(slots=True)
class Snapshot:
    """Live entities by id, with the indexes that decisions need. Ended tasks leave with their last change."""

    settings: Settings = field(default_factory=Settings)
    revision: int = 0
    term: int = 0
    nodes: dict[str, Node] = field(default_factory=lambda: {})
    tasks: dict[str, Task] = field(default_factory=lambda: {})
    allocations: dict[str, Allocation] = field(default_factory=lambda: {})
    policies: dict[str, QuotaPolicy] = field(default_factory=lambda: {})
    services: dict[str, Service] = field(default_factory=lambda: {})
    prices: PriceTable | None = None
    """What free room is worth, as far as that has been worked out: its owner puts another in its place between decisions."""
    reservations: dict[str, Reservation] = field(default_factory=lambda: {})
    past: dict[str, PastUse] = field(default_factory=lambda: {})
    """By project."""
    run_times: RunTimes = field(default_factory=RunTimes)
    """How long tasks of each kind ran lately."""

    queued: dict[str, Task] = field(default_factory=lambda: {})
    by_node: dict[str, dict[str, Allocation]] = field(default_factory=lambda: defaultdict(dict))
    by_task: dict[str, dict[str, Allocation]] = field(default_factory=lambda: defaultdict(dict))
    by_group: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    by_service: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    by_array: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    placed_of_array: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    dependents: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Id of a task or an array to the queued tasks that come after it."""
    node_changes: dict[str, int] = field(default_factory=lambda: {})
    """Node name to a counter that moves whenever the node or what it holds changes; the latest change is last."""
    queue_log: list[str] = field(default_factory=lambda: [], repr=False, compare=False)
    """Ids of tasks in the order in which they changed, so that a reader need look only at what moved since it last looked."""
    queue_log_start: int = field(default=0, compare=False)
    """How many entries have been dropped from the front of the log."""
    scratch: object = field(default=None, init=False, repr=False, compare=False)
    """Belongs to the scheduling functions, which keep derived columns here. No result depends on it."""
    _counter: int = 0

    def advance(self, entities: Iterable[Entity], removed: Iterable[tuple[type[Entity], str]] = ()) -> None:
        """Take in what a committed change wrote. Ended tasks and allocations are dropped: the store keeps their story."""
        for entity in entities:
            match entity:
                case Node():
                    self.nodes[entity.name] = entity
                    self._touch(entity.name)
                case Task():
                    self._put_task(entity)
                case Allocation():
                    self._put_allocation(entity)
                case QuotaPolicy():
                    self.policies[entity.name] = entity
                case Service():
                    self.services[entity.name] = entity
                case Reservation():
                    self.reservations[entity.name] = entity
                case PastUse():
                    self.past[entity.name] = entity
        for kind, name in removed:
            self._remove(kind, name)

    def _put_task(self, task: Task) -> None:
        self._log(task.id)
        if task.status.ended:
            self.run_times.learn(task)
            self._remove(Task, task.id)
            return
        if self.dependents and task.id not in self.tasks:
            # Inside one batch a task may stand before what it comes after.
            self._log_dependents(task.id, task.spec.array.id if task.spec.array else "")
        self.tasks[task.id] = task
        if task.status is TaskStatus.QUEUED:
            self.queued[task.id] = task
        else:
            self.queued.pop(task.id, None)
        if task.spec.group:
            self.by_group[task.spec.group].add(task.id)
        if task.spec.service:
            self.by_service[task.spec.service].add(task.id)
        if task.spec.array:
            self.by_array[task.spec.array.id].add(task.id)
            if task.status is TaskStatus.QUEUED:
                _discard(self.placed_of_array, task.spec.array.id, task.id)
            else:
                self.placed_of_array[task.spec.array.id].add(task.id)
        for after in task.spec.after:
            if task.status is TaskStatus.QUEUED:
                self.dependents[after.task].add(task.id)
            else:
                _discard(self.dependents, after.task, task.id)

    def _put_allocation(self, allocation: Allocation) -> None:
        if allocation.status.ended:
            self._remove(Allocation, allocation.id)
        else:
            self.allocations[allocation.id] = allocation
            self.by_node[allocation.node][allocation.id] = allocation
            self.by_task[allocation.task][allocation.id] = allocation
        self._touch(allocation.node)

    def _remove(self, kind: type[Entity], name: str) -> None:
        if kind is Task:
            self._log(name)
            task = self.tasks.pop(name, None)
            self.queued.pop(name, None)
            if task and task.spec.group:
                _discard(self.by_group, task.spec.group, name)
            if task and task.spec.service:
                _discard(self.by_service, task.spec.service, name)
            if task:
                self._forget_links(task)
        elif kind is Allocation:
            allocation = self.allocations.pop(name, None)
            if allocation:
                _drop(self.by_node, allocation.node, name)
                _drop(self.by_task, allocation.task, name)
                self._touch(allocation.node)
        elif kind is Node:
            self.nodes.pop(name, None)
            self._touch(name)
        elif kind is QuotaPolicy:
            self.policies.pop(name, None)
        elif kind is Service:
            self.services.pop(name, None)
        elif kind is Reservation:
            self.reservations.pop(name, None)

    def _forget_links(self, task: Task) -> None:
        """The task is gone: whoever comes after it, or after the whole array of which it was the last, is to be looked at."""
        freed = [task.id]
        if task.spec.array:
            array = task.spec.array.id
            _discard(self.placed_of_array, array, task.id)
            _discard(self.by_array, array, task.id)
            if array not in self.by_array:
                freed.append(array)
        for after in task.spec.after:
            _discard(self.dependents, after.task, task.id)
        self._log_dependents(*freed)

    def _log_dependents(self, *names: str) -> None:
        for name in names:
            for dependent in self.dependents.get(name, ()):
                self._log(dependent)

    def _touch(self, node: str) -> None:
        self._counter += 1
        self.node_changes.pop(node, None)
        self.node_changes[node] = self._counter

    def _log(self, task: str) -> None:
        self.queue_log.append(task)
        if len(self.queue_log) > 2 * len(self.tasks) + 10_000:
            half = len(self.queue_log) // 2
            del self.queue_log[:half]
            self.queue_log_start += half


def still_of(snapshot: Snapshot) -> Snapshot:
    """The same entities without the indexes: taken in a moment, for `copy_of` to make a snapshot of, wherever there is time."""
    return Snapshot(
        *(snapshot.settings, snapshot.revision, snapshot.term),
        *(snapshot.nodes.copy(), snapshot.tasks.copy(), snapshot.allocations.copy(), snapshot.policies.copy()),
        *(snapshot.services.copy(), snapshot.prices, snapshot.reservations.copy(), snapshot.past.copy()),
        run_times=snapshot.run_times.copy(),
    )


def copy_of(snapshot: Snapshot) -> Snapshot:
    """A snapshot of its own with the same (immutable) entities."""
    twin = Snapshot(
        settings=snapshot.settings,
        revision=snapshot.revision,
        term=snapshot.term,
        prices=snapshot.prices,
        run_times=snapshot.run_times.copy(),
    )
    for entities in (
        *(snapshot.nodes, snapshot.policies, snapshot.services),
        *(snapshot.past, snapshot.reservations, snapshot.tasks, snapshot.allocations),
    ):
        twin.advance(entities.values())
    return twin


def _discard(index: dict[str, set[str]], key: str, member: str) -> None:
    members = index.get(key)
    if members is not None:
        members.discard(member)
        if not members:
            del index[key]


def _drop(index: dict[str, dict[str, Allocation]], key: str, member: str) -> None:
    index[key].pop(member, None)
    if not index[key]:
        del index[key]
