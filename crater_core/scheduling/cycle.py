"""One cycle: order, feasibility, score, device choice, try on the ledger, plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from crater_core.model.allocation import Placement
from crater_core.model.plan import Plan
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task
from crater_core.scheduling.columns import Held
from crater_core.scheduling.diagnosis import why_nothing_fits
from crater_core.scheduling.fairness import Shares
from crater_core.scheduling.fits import Fits
from crater_core.scheduling.ledger import Ledger
from crater_core.scheduling.memory import Memory, memory_of
from crater_core.scheduling.order import Order
from crater_core.scheduling.queue import Lane, Place
from crater_core.scheduling.quotas import QuotaBook, held_of, listed
from crater_core.scheduling.spread import best_spread
from crater_core.scheduling.strategies import STRATEGIES


def schedule(snapshot: Snapshot, now_ms: int) -> Plan:
    """Place what fits, in order, and say of everything else that was looked at why it waits.

    Pure: the same snapshot and time give the same plan. A cycle looks at `settings.cycle_tasks_max` tasks at most.
    """
    memory = memory_of(snapshot)
    memory.queue.sync(snapshot, now_ms)
    return Cycle(snapshot, memory, now_ms).run()


class Cycle:
    """The state of one call of `schedule`."""

    def __init__(self, snapshot: Snapshot, memory: Memory, now_ms: int) -> None:
        self.snapshot = snapshot
        self.memory = memory
        self.now_ms = now_ms
        held = memory.columns.held_in_all
        self.ledger = Ledger(memory.columns)
        self.quotas = QuotaBook(snapshot.policies, held)
        self.shares = Shares(memory.columns, held)
        self.placements: list[Placement] = []
        self.waiting = Waiting()
        self._fits: dict[int, Fits] = {}
        """By lane: hashing a shape costs more than the rest of the look-up."""

    def run(self) -> Plan:
        order = Order(self.memory.queue.lanes.values(), self.shares)
        for lane, start in islice(order, self.snapshot.settings.cycle_tasks_max):
            reason = self._place(lane, lane.places[start][1])
            if reason is None:
                order.advance(lane, start + 1)
            else:
                # Room and quota only shrink within a cycle: what holds for the first of a lane holds for those behind it.
                self.waiting.add(lane.places[start:], reason)
        for task in self.memory.queue.delayed.values():
            self.waiting.add([(task.queued_at_ms, task.id)], backing_off(task, self.now_ms))
        return Plan(self.snapshot.revision, tuple(self.placements), (), self.waiting)

    def _place(self, lane: Lane, task: str) -> Reason | None:
        """Take room for the task, or say why there is none."""
        if lane.shape.strategy not in STRATEGIES:
            return Reason.of(ReasonCode.UNKNOWN_STRATEGY, strategy=lane.shape.strategy, known=listed(STRATEGIES))
        fits = self._fits_of(lane)
        if not lane.control:
            refusal = self._over_quota(lane, held_of(lane.shape.request.amounts))
            if refusal is not None:
                return refusal
        row = fits.best() if lane.service is None else best_spread(fits, self.snapshot, self.placements, lane.service)
        if row < 0:
            return why_nothing_fits(self.snapshot, fits)
        return self._take(lane, fits, row, task)

    def _fits_of(self, lane: Lane) -> Fits:
        found = self._fits.get(id(lane))
        if found is None:
            found = self._fits[id(lane)] = self.memory.fits(lane.shape)
        return found

    def _take(self, lane: Lane, fits: Fits, row: int, task: str) -> Reason | None:
        mark = self.ledger.mark()
        placement = self.ledger.take(fits, row, task, member=0)
        if not lane.control:
            held = _held(lane, placement)
            # A share by memory alone takes an amount of compute that is known only once its device is.
            refusal = self._over_quota(lane, held) if lane.shape.shares else None
            if refusal is not None:
                self.ledger.rollback(mark)
                return refusal
            self.quotas.take(lane.project, lane.user, lane.quota_policy, held)
            self.shares.take(lane.project, held)
        self.placements.append(placement)
        return None

    def _over_quota(self, lane: Lane, wanted: Held) -> Reason | None:
        return self.quotas.refusal(lane.project, lane.user, lane.quota_policy, wanted)


class Waiting(Mapping[str, Reason]):
    """Task id to reason. Holds whole stretches of lanes, so that a hundred thousand tasks with one reason cost little."""

    def __init__(self) -> None:
        self._stretches: list[tuple[list[Place], Reason]] = []
        self._by_task: dict[str, Reason] | None = None

    def add(self, places: list[Place], reason: Reason) -> None:
        self._stretches.append((places, reason))
        self._by_task = None

    def __getitem__(self, task: str) -> Reason:
        if self._by_task is None:
            self._by_task = {name: reason for places, reason in self._stretches for _, name in places}
        return self._by_task[task]

    def __iter__(self) -> Iterator[str]:
        return (name for places, _ in self._stretches for _, name in places)

    def __len__(self) -> int:
        return sum(len(places) for places, _ in self._stretches)

    def __repr__(self) -> str:
        return repr(dict(self))


def backing_off(task: Task, now_ms: int) -> Reason:
    before = task.reason
    if before is None:
        why: str | int = "it was asked to wait"
    elif before.code is ReasonCode.BACKOFF:
        why = before.facts.get("why", "")
    else:
        why = sentence(before).rstrip(".")
    return Reason.of(ReasonCode.BACKOFF, why=why, wait_ms=task.not_before_ms - now_ms)


def _held(lane: Lane, placement: Placement) -> Held:
    request = lane.shape.request
    return [
        sum(grant.compute_milli for grant in placement.grants),
        request.cpu_milli,
        request.memory_bytes,
        request.disk_bytes,
        sum(grant.memory_mib for grant in placement.grants),
    ]
