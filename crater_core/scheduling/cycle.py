"""One cycle: order, feasibility, score, device choice, try on the ledger, plan."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np

from crater_core.model.allocation import Placement
from crater_core.model.plan import Plan, Preemption
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Apart, Task
from crater_core.scheduling.arrays import array_full
from crater_core.scheduling.columns import Held
from crater_core.scheduling.diagnosis import why_nothing_fits
from crater_core.scheduling.endings import Ending, expected_end
from crater_core.scheduling.fairness import Shares
from crater_core.scheduling.fits import NEVER, Fits
from crater_core.scheduling.guarantees import Guarantees
from crater_core.scheduling.keeping import Keeping
from crater_core.scheduling.ledger import Ledger
from crater_core.scheduling.memory import Memory, memory_of
from crater_core.scheduling.order import Order, Ranks
from crater_core.scheduling.preemption import ByGuarantee, ByPriority, Right, Wanted, choose_victims
from crater_core.scheduling.queue import Lane, Place
from crater_core.scheduling.quotas import QuotaBook, listed
from crater_core.scheduling.reserving import ByReservation, Reserved
from crater_core.scheduling.spread import Neighbours
from crater_core.scheduling.strategies import STRATEGIES
from crater_core.scheduling.waiting import Waiting, backing_off

_FOR_WANT_OF_ROOM = {
    ReasonCode.NO_ROOM,
    ReasonCode.FRAGMENTED,
    ReasonCode.MPS_USER,
    ReasonCode.HELD_FOR_ANOTHER,
    ReasonCode.RESERVED,
    ReasonCode.WAITING_FOR_GANG,
}

_OVER_QUOTA = {ReasonCode.QUOTA_USED_UP, ReasonCode.KEPT_FOR_GUARANTEE}

OWN_ROOM = 1 << 40
"""Added to the score of a row that is reserved for the task's project: more than anything else gives or takes."""


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
        self.ledger = Ledger(memory.columns, snapshot.revision)
        self.quotas = QuotaBook(snapshot.policies, held)
        self.shares = Shares(memory.columns, held, snapshot.settings, snapshot.past, now_ms)
        self.neighbours = Neighbours(snapshot)
        self.guarantees = Guarantees(snapshot, self.quotas, memory.columns)
        self.reserved = Reserved(snapshot, memory.columns, self.ledger, now_ms)
        self.keeping = Keeping(snapshot, memory, self.ledger, self.reserved, now_ms)
        self.placements: list[Placement] = []
        self.preemptions: list[Preemption] = []
        self.waiting = Waiting(memory.queue.held_now())
        self.news: dict[str, Reason] = {task: memory.queue.held[task] for task in memory.queue.held_news}
        self._started: Counter[str] = Counter()
        """By array, how many of it this cycle has placed."""
        self._stopped: set[str] = set()
        """Tasks that this cycle stops for others."""
        self._settled: set[str] = set()
        """Tasks that were decided before their turn."""
        self._fits: dict[int, Fits] = {}
        """By lane: hashing a shape costs more than the rest of the look-up."""
        self._full: dict[int, Reason] = {}
        """By fits, once nothing fits: room only shrinks within a cycle, so the first answer stays true."""

    def run(self) -> Plan:
        self._preemptors_first()
        self._in_order()
        for task in self.memory.queue.delayed.values():
            self._wait_alone(task, backing_off(task, self.now_ms))
        return Plan(self.snapshot.revision, tuple(self.placements), tuple(self.preemptions), self.waiting, self.news)

    def run_up_to(self, task: str) -> None:
        """Decide only what goes before a queued task: what is left and kept then is what it meets."""
        self._preemptors_first()
        self._in_order(task)

    def why_not_now(self, lane: Lane, task: str) -> Reason | None:
        """Why the task could not start if this were its turn; None when it could. Takes nothing."""
        if task in self._settled or task in self.waiting:
            return self.waiting.get(task)
        mark, first = self.ledger.mark(), len(self.placements)
        reason = self._place(lane, task)
        self._undo(mark, first)
        return reason

    def _in_order(self, last: str | None = None) -> None:
        """Whoever stands behind the first of its lane that has to wait has its reason, and is not looked at."""
        order = Order(self.memory.queue.lanes.values(), self.shares, Ranks(self.snapshot.settings, self.now_ms))
        stops_at = self.memory.queue.lane_of(last) if last is not None else None
        for lane, start in islice(order, self.snapshot.settings.cycle_tasks_max):
            task = lane.places[start][1]
            if task == last:
                return
            reason = None if task in self._settled else self._place(lane, task)
            if reason is None or self._room_is_made(lane, task, reason):
                order.advance(lane, start + 1)
                continue
            self._leave(lane, start, reason)
            if self.snapshot.settings.passing == "none" and reason.code in _FOR_WANT_OF_ROOM:
                self._leave_all_behind(order, task)
                return
            if lane is stops_at:
                return

    # --- one task

    def _place(self, lane: Lane, task: str) -> Reason | None:
        """Take room for the task, or say why there is none."""
        if lane.shape.strategy not in STRATEGIES:
            return Reason.of(ReasonCode.UNKNOWN_STRATEGY, strategy=lane.shape.strategy, known=listed(STRATEGIES))
        if lane.array is not None and (full := array_full(self.snapshot, lane.array, self._started[lane.array.id])):
            return full
        fits, most = self._fits_of(lane), lane.members
        if not lane.control:
            most = self._members_within_quota(lane, fits)
            if isinstance(most, Reason):
                return most
        refusal = self._place_members(lane, fits, task, most)
        if refusal is not None and lane.shape.counts_by_device and refusal.code in _OVER_QUOTA:
            refusal = self._place_members(lane, fits, task, most, thrifty=True)
        if lane.array is not None and refusal is None:
            self._started[lane.array.id] += 1
        return refusal

    def _place_members(self, lane: Lane, fits: Fits, task: str, most: int, thrifty: bool = False) -> Reason | None:
        """All members that must be placed, and of the others as many as there is room for; or none and the reason."""
        mark, first = self.ledger.mark(), len(self.placements)
        ending = expected_end(self.now_ms, lane.limit_ms, lane.foretold_ms)
        for member in range(most):
            row, bars = self._find(lane, fits, task, first, ending, thrifty)
            if row < 0:
                if member >= lane.fewest:
                    break
                reason = self._why(lane, fits, first, bars)
                self._undo(mark, first)
                return reason
            self.placements.append(self.ledger.take(fits, row, task, member, ending))
        return self._charge(lane, mark, first) if not lane.control else None

    def _members_within_quota(self, lane: Lane, fits: Fits) -> int | Reason:
        """How many members quota allows; a reason when that is not enough to start."""

        if lane.members == 1:
            return self._over_quota(lane, fits.wanted) or 1

        def refusal(members: int) -> Reason | None:
            return self._over_quota(lane, [members * want for want in fits.wanted])

        refused = refusal(lane.fewest)
        if refused is not None:
            return refused
        allowed, too_many = lane.fewest, lane.members + 1
        while too_many - allowed > 1:
            middle = (allowed + too_many) // 2
            allowed, too_many = (middle, too_many) if refusal(middle) is None else (allowed, middle)
        return allowed

    def _find(
        self, lane: Lane, fits: Fits, task: str, first: int, ending: Ending | None, thrifty: bool
    ) -> tuple[int, Reason | None]:
        """The best row that the task may have, or -1 with what keeps it off the rows on which it would fit. With `thrifty`, the
        row on which its share takes the least compute is the best.
        """
        row = fits.best()
        mine = self.reserved.rows_now_of(lane.project) if self.reserved.rows else []
        plain = lane.apart is None and not mine and not thrifty
        if row < 0 or (plain and row not in self.keeping.rows and row not in self.reserved.rows):
            return row, None
        score = fits.score.copy() if lane.apart is None else self.neighbours.score(fits, lane.apart, self.placements, first)
        if thrifty:
            score = np.where(score > NEVER, -fits.least_compute(), NEVER)
        for row in mine:  # What is reserved for the project is used before what all may use.
            score[row] += OWN_ROOM if score[row] > NEVER else 0
        first_bar: Reason | None = None
        while True:
            row = int(score.argmax())
            if score[row] <= NEVER:
                return -1, first_bar
            bars = self.keeping.why_barred(fits, row, task, lane.project, ending)
            if bars is None:
                return row, None
            first_bar = first_bar or bars
            score[row] = NEVER

    def _why(self, lane: Lane, fits: Fits, first: int, bars: Reason | None) -> Reason:
        placed = len(self.placements) - first
        if placed:
            return Reason.of(ReasonCode.WAITING_FOR_GANG, placed=placed, members=lane.fewest)
        if lane.apart is not None:
            apart = self.neighbours.why_none(fits, lane.apart, self.placements, first)
            if apart is not None:
                return apart
        if bars is not None:
            return bars
        reason = self._full.get(id(fits))
        if reason is None:
            reason = self._full[id(fits)] = why_nothing_fits(self.snapshot, fits)
        return reason

    def _charge(self, lane: Lane, mark: int, first: int) -> Reason | None:
        """Count the placements since `first` against quota and share. A share by memory alone, or what may be a MIG slice, takes
        an amount of compute that is known only once its device is: that may be too much after all.
        """
        held = _held(lane, self.placements[first:])
        refusal = self._over_quota(lane, held) if lane.shape.counts_by_device else None
        while refusal is not None and len(self.placements) - first > lane.fewest:
            self._undo(mark + len(self.placements) - first - 1, len(self.placements) - 1)  # An elastic gang can do with less.
            held = _held(lane, self.placements[first:])
            refusal = self._over_quota(lane, held)
        if refusal is not None:
            self._undo(mark, first)
            return refusal
        self.quotas.take(lane.project, lane.user, lane.quota_policy, held)
        self.guarantees.take(held)
        self.shares.take(lane.project, held)
        return None

    def _undo(self, mark: int, first: int) -> None:
        self.ledger.rollback(mark)
        del self.placements[first:]

    def _over_quota(self, lane: Lane, wanted: Held) -> Reason | None:
        refused = self.quotas.refusal(lane.project, lane.user, lane.quota_policy, wanted)
        return refused or self.guarantees.refusal(lane.project, lane.quota_policy, wanted)

    def _fits_of(self, lane: Lane) -> Fits:
        found = self._fits.get(id(lane))
        if found is None:
            found = self._fits[id(lane)] = self.memory.fits(lane.shape)
        return found

    # --- what is not placed

    def _leave(self, lane: Lane, start: int, reason: Reason) -> None:
        """Room and quota only shrink within a cycle: what holds for the first of a lane holds for those behind it."""
        queued_at_ms, task = lane.places[start]
        if reason.code in _FOR_WANT_OF_ROOM and not lane.control and self.snapshot.settings.passing == "backfill":
            self.keeping.reserve(self._fits_of(lane), task, lane.project, lane.fewest, self.now_ms - queued_at_ms)
        self._wait(lane, start, reason)

    def _wait(self, lane: Lane, start: int, reason: Reason) -> None:
        """The tasks of the lane from `start` on, but for those decided before, wait for this reason."""
        places = lane.places[start:]
        if self._settled:
            places = [place for place in places if place[1] not in self._settled]
        self.waiting.add(places, reason)
        others = [names for code, names in lane.codes.items() if names and code is not reason.code]
        if others:
            decided = self._settled.union(task for _, task in lane.places[:start])
            self.news.update((name, reason) for names in others for name in names if name not in decided)

    def _wait_alone(self, task: Task, reason: Reason) -> None:
        self.waiting.add([(task.queued_at_ms, task.id)], reason)
        if task.reason is None or task.reason.code is not reason.code:
            self.news[task.id] = reason

    def _leave_all_behind(self, order: Order, holder: str) -> None:
        for lane, start in islice(order, self.snapshot.settings.cycle_tasks_max):
            self._wait(lane, start, Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder=holder))

    # --- preemption

    def _room_is_made(self, lane: Lane, task: str, reason: Reason) -> bool:
        """Stop others so that this task fits, where it has a right to that, and keep the room they leave."""
        if reason.code not in _FOR_WANT_OF_ROOM or lane.control:
            return False
        fits = self._fits_of(lane)
        lender, waited_ms = None, self.now_ms - self.snapshot.queued[task].queued_at_ms
        if waited_ms >= self.snapshot.settings.reclaim_after_ms:
            lender = self.guarantees.lender(lane.project, lane.quota_policy, [lane.fewest * want for want in fits.wanted])
        if lender is not None and self._stop_for(lane, fits, task, ByGuarantee(lender, self.guarantees), lender):
            return True
        mine = tuple(self.reserved.rows_now_of(lane.project)) if self.reserved.rows else ()
        if mine and self._stop_for(lane, fits, task, ByReservation(lane.project, mine)):
            return True
        if lane.shape.strategy != "preemptive":
            return False
        own = tuple(policy.name for policy in self.quotas.policies_for(lane.project, lane.quota_policy))
        return self._stop_for(lane, fits, task, ByPriority(lane.priority, own, self.guarantees))

    def _stop_for(self, lane: Lane, fits: Fits, task: str, right: Right, policy: str = "") -> bool:
        barred, alone = self.keeping.barred(lane.project), False
        if lane.apart is not None:
            barred |= self.neighbours.barred(fits, lane.apart, self.placements, len(self.placements))
            alone = lane.apart.members is Apart.REQUIRE
        wanted = Wanted(fits, lane.fewest, 1 if alone else lane.fewest)
        victims = choose_victims(self.snapshot, wanted, right, self.now_ms, barred, self._stopped)
        if victims is None:
            return False
        stopped = [id for victim in victims.tasks for id in sorted(self.snapshot.by_task[victim])]
        reservation = self.reserved.name_of(lane.project) if isinstance(right, ByReservation) else ""
        self.preemptions += [Preemption(id, task, policy, reservation) for id in stopped]
        self.guarantees.stop(victims.tasks)
        self._stopped.update(victims.tasks)
        self.keeping.keep_all(victims.rows, task)
        self._promise(lane)
        self._settled.add(task)
        self._wait_alone(self.snapshot.tasks[task], Reason.of(ReasonCode.WAITING_FOR_PREEMPTION, victims=len(stopped)))
        return True

    def _promise(self, lane: Lane) -> None:
        """Room that is being made counts as used, so that a quota is not passed once it is there."""
        wanted = [lane.fewest * want for want in self._fits_of(lane).wanted]
        self.quotas.take(lane.project, lane.user, lane.quota_policy, wanted)
        if lane.array is not None:
            self._started[lane.array.id] += 1

    def _preemptors_first(self) -> None:
        """Room that victims leave belongs to the task they were stopped for, until it has been placed."""
        victims: dict[str, int] = {}
        for row, leaving in self.memory.columns.leaving.items():
            for preemptor, count in leaving.items():
                if preemptor in self.snapshot.queued:
                    self.keeping.keep(row, preemptor)
                    victims[preemptor] = victims.get(preemptor, 0) + count
        claims = {*victims, *(task for task in self.memory.queue.preemptors.values() if task in self.snapshot.queued)}
        for task in sorted(claims, key=lambda task: (-self.snapshot.queued[task].spec.priority, *_place_of(self.snapshot, task))):
            lane = self.memory.queue.lane_of(task)
            if lane is None:
                continue
            if self._place(lane, task) is None:
                self.keeping.release(task)
                self._settled.add(task)
            elif task in victims:
                if lane.members > 1:  # What its members need beside the room that victims leave.
                    self.keeping.keep_all(np.flatnonzero(self._fits_of(lane).score > NEVER).tolist(), task)
                self._promise(lane)
                reason = Reason.of(ReasonCode.WAITING_FOR_PREEMPTION, victims=victims[task])
                self._wait_alone(self.snapshot.tasks[task], reason)
                self._settled.add(task)


def _place_of(snapshot: Snapshot, task: str) -> Place:
    return snapshot.queued[task].queued_at_ms, task


def _held(lane: Lane, placements: list[Placement]) -> Held:
    request, count = lane.shape.request, len(placements)
    gpu_milli = gpu_memory_mib = 0
    for placement in placements:
        for grant in placement.grants:
            gpu_milli += grant.counts_milli
            gpu_memory_mib += grant.memory_mib
    return [gpu_milli, request.cpu_milli * count, request.memory_bytes * count, request.disk_bytes * count, gpu_memory_mib]
