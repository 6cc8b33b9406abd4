"""What would become of tasks, tried on a copy of the snapshot through the same admission, cycles and steps: a dry run, and the
time at which a waiting task is expected to start.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from crater_core.lifecycle.inputs import Planned, Report, TaskSubmitted
from crater_core.model.allocation import Allocation, AllocationStatus, Placement
from crater_core.model.plan import Refused
from crater_core.model.reason import Reason
from crater_core.model.snapshot import Snapshot, copy_of
from crater_core.model.task import TaskSpec
from crater_core.scheduling import admit, schedule
from crater_core.scheduling.endings import foretold_end
from crater_core.simulation.fill import step

STEPS_MAX = 300
"""How many ends a look ahead goes through."""
HORIZON_MS = 30 * 86_400_000
TASKS_MAX = 20_000
"""With more live tasks than this nobody looks ahead: it would take seconds."""
_TOO_MANY = f"more than {TASKS_MAX:,} tasks wait or run: nobody looks ahead"


@dataclass(frozen=True, slots=True)
class Expected:
    """When a task is expected to start. `sure`: only declared limits were counted on, so it starts no later if nothing more
    important comes. Without a time, `why` says what hides it.
    """

    at_ms: int | None = None
    sure: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What would become of one task. `refusal` names the field to change; without one it was admitted, and is either placed
    now, or placed once `victims` have stopped, or waits for `reason`.
    """

    refusal: Refused | None = None
    placements: tuple[Placement, ...] = ()
    victims: tuple[str, ...] = ()
    """Tasks that would be stopped for it."""
    reason: Reason | None = None
    expected: Expected = field(default_factory=Expected)


def what_if(snapshot: Snapshot, specs: Sequence[TaskSpec], now_ms: int) -> tuple[Verdict, ...]:
    """Submit the tasks, in order, to a copy of the snapshot, and look what one cycle makes of them and when the rest start.

    Changes nothing: the copy is thrown away.
    """
    twin = copy_of(snapshot)
    names: list[str] = []
    refused: dict[int, Refused] = {}
    for index, spec in enumerate(specs):
        answer = admit(spec, twin)
        names.append(f"~{index:05d}")  # Behind every real task that came in the same millisecond.
        if isinstance(answer, Refused):
            refused[index] = answer
        else:
            step(twin, TaskSubmitted(names[index], spec), now_ms)
    future = _Future(twin, now_ms)
    future.cycle()
    plan_reasons = dict(future.waiting)
    victims = {name: tuple(sorted(tasks)) for name, tasks in future.victims.items()}
    placed_now = {name: tuple(places) for name, places in future.placements.items()}
    waiting = [name for index, name in enumerate(names) if index not in refused and name not in placed_now]
    future.look_ahead(waiting)
    return tuple(
        Verdict(refused[index])
        if index in refused
        else Verdict(None, placed_now.get(name, ()), victims.get(name, ()), plan_reasons.get(name), future.expected(name))
        for index, name in enumerate(names)
    )


def expected_start(snapshot: Snapshot, task: str, now_ms: int) -> Expected:
    """When a queued task will start, if nothing comes, and what runs ends when it was declared or is foretold to."""
    if len(snapshot.tasks) > TASKS_MAX:
        return Expected(None, False, _TOO_MANY)
    future = _Future(copy_of(snapshot), now_ms)
    future.cycle()
    future.look_ahead([task])
    return future.expected(task)


class _Future:
    """A snapshot of its own whose clock runs ahead from end to end."""

    def __init__(self, twin: Snapshot, now_ms: int) -> None:
        self.twin = twin
        self.now_ms = self.began_ms = now_ms
        self.placements: dict[str, list[Placement]] = {}
        self.started_ms: dict[str, int] = {}
        self.waiting: dict[str, Reason] = {}
        self.victims: dict[str, set[str]] = {}
        self.sure = True
        self.too_far = ""
        self._sure_at: dict[str, bool] = {}
        self._ends: list[tuple[int, str]] = []
        self._known: set[str] = set()
        self._count = 0
        self._too_many = len(twin.tasks) > TASKS_MAX
        if not self._too_many:
            for allocation in twin.allocations.values():
                self._foretell(allocation)

    def _foretell(self, allocation: Allocation) -> None:
        ending = foretold_end(self.twin, allocation, self.now_ms)
        if ending is not None:
            heapq.heappush(self._ends, (max(ending.at_ms, self.now_ms), allocation.id))
            if not ending.sure:
                self._known.add(allocation.id)

    def cycle(self) -> None:
        plan = schedule(self.twin, self.now_ms)
        ids: list[str] = []
        for _ in plan.placements:
            self._count += 1
            ids.append(f"~a{self._count:07d}")
        for preemption in plan.preemptions:
            self.victims.setdefault(preemption.preemptor, set()).add(self.twin.allocations[preemption.victim].task)
        for placement in plan.placements:
            self.placements.setdefault(placement.task, []).append(placement)
            self.started_ms.setdefault(placement.task, self.now_ms)
            self._sure_at.setdefault(placement.task, self.sure)
        self.waiting = dict(plan.waiting)
        step(self.twin, Planned(plan, tuple(ids)), self.now_ms)
        for id in ids:
            allocation = self.twin.allocations[id]
            step(self.twin, _report(allocation, AllocationStatus.RUNNING, self.now_ms), self.now_ms)
            self._foretell(self.twin.allocations[id])
        for preemption in plan.preemptions:
            heapq.heappush(self._ends, (self.now_ms, preemption.victim))

    def look_ahead(self, tasks: Sequence[str]) -> None:
        """From end to end, until all of these have started or nothing more can be foretold."""
        if self._too_many:
            self.too_far = _TOO_MANY
            return
        for _ in range(STEPS_MAX):
            if all(task in self.started_ms for task in tasks):
                return
            if not self._ends:
                self.too_far = self._why_nothing_ends()
                return
            self.now_ms = max(self.now_ms, self._ends[0][0])
            if self.now_ms - self.began_ms > HORIZON_MS:
                self.too_far = "it is more than 30 days away"
                return
            while self._ends and self._ends[0][0] <= self.now_ms:
                self._end(heapq.heappop(self._ends)[1])
            self.cycle()
        self.too_far = f"more than {STEPS_MAX} tasks would have to end first"

    def _end(self, allocation_id: str) -> None:
        allocation = self.twin.allocations.get(allocation_id)
        if allocation is None:
            return
        self.sure &= allocation_id not in self._known
        stopping = allocation.status is AllocationStatus.STOPPING
        status = AllocationStatus.CANCELLED if stopping else AllocationStatus.SUCCEEDED
        step(self.twin, _report(allocation, status, self.now_ms), self.now_ms)

    def _why_nothing_ends(self) -> str:
        endless = len({allocation.task for allocation in self.twin.allocations.values()})
        if not endless:
            return "nothing runs whose end would make room"
        return f"{endless} running task(s) have no time limit, and none of their kind has ended before"

    def expected(self, task: str) -> Expected:
        at_ms = self.started_ms.get(task)
        if at_ms is None:
            return Expected(None, False, self.too_far)
        return Expected(at_ms, self._sure_at[task])


def _report(allocation: Allocation, status: AllocationStatus, now_ms: int) -> Report:
    return Report(allocation.node, allocation.id, allocation.token, status, now_ms)
