"""Replays arrivals and ends on a virtual clock through `admit`, `schedule` and `apply`, and measures what came of it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from crater_core.lifecycle.inputs import NodeRegistered, Planned, PolicySet, Report, TaskSubmitted
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.plan import Admitted, Plan
from crater_core.model.quota import QuotaPolicy
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.units import MILLI
from crater_core.scheduling import admit, schedule
from crater_core.simulation.fill import step
from crater_core.simulation.traces import Arrival, Trace

_END, _ARRIVE, _WAKE = range(3)


@dataclass(slots=True)
class Outcome:
    """What a replay measured. Times are milliseconds of the trace's own clock."""

    trace: str
    strategy: str
    tasks: int = 0
    refused: int = 0
    finished: int = 0
    preemptions: int = 0
    lost_work_ms: int = 0
    """GPU-thousandths times milliseconds that preemption threw away, over 1000: milliseconds of one GPU."""
    span_ms: int = 0
    waits_ms: list[int] = field(default_factory=lambda: [])
    waits_of: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By project."""
    gpu_held_ms: int = 0
    """Milliseconds of one GPU held while tasks still came."""
    gpu_capacity_ms: int = 0
    started_ms: dict[str, int] = field(default_factory=lambda: {})

    @property
    def utilisation(self) -> float:
        return self.gpu_held_ms / self.gpu_capacity_ms if self.gpu_capacity_ms else 0.0

    @property
    def mean_wait_ms(self) -> float:
        return sum(self.waits_ms) / len(self.waits_ms) if self.waits_ms else 0.0

    def percentile_wait_ms(self, percent: int) -> int:
        return percentile(self.waits_ms, percent)

    @property
    def fairness(self) -> float:
        """Jain's index over the projects' mean waits plus a minute: 1 is all alike."""
        means = [60_000 + sum(waits) / len(waits) for waits in self.waits_of.values()]
        return sum(means) ** 2 / (len(means) * sum(mean * mean for mean in means)) if means else 1.0


def percentile(values: list[int], percent: int) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0


def simulate(trace: Trace, settings: Settings, policies: Iterable[QuotaPolicy] = ()) -> Outcome:
    """Run a whole trace. Deterministic: the same arguments give the same outcome."""
    return _Replay(trace, settings, policies).run()


class _Replay:
    def __init__(self, trace: Trace, settings: Settings, policies: Iterable[QuotaPolicy]) -> None:
        self.trace = trace
        self.snapshot = Snapshot(settings=settings)
        self.outcome = Outcome(trace.name, settings.strategy)
        for node in trace.nodes:
            step(self.snapshot, NodeRegistered(node), 0)
        for policy in policies:
            step(self.snapshot, PolicySet(policy), 0)
        self.capacity_milli = MILLI * sum(len(node.devices) for node in trace.nodes)
        self.held_milli = 0
        self.clock_ms = 0
        self.last_arrival_ms = max((arrival.at_ms for arrival in trace.arrivals), default=0)
        self.arrival_of: dict[str, Arrival] = {f"t{i:07d}": arrival for i, arrival in enumerate(trace.arrivals)}
        self.events: list[tuple[int, int, str]] = [(arrival.at_ms, _ARRIVE, name) for name, arrival in self.arrival_of.items()]
        heapq.heapify(self.events)

    def run(self) -> Outcome:
        while self.events:
            now_ms = self.events[0][0]
            self._pass_time(now_ms)
            while self.events and self.events[0][0] == now_ms:
                _, kind, name = heapq.heappop(self.events)
                if kind == _ARRIVE:
                    self._arrive(name, now_ms)
                elif kind == _END:
                    self._end(name, now_ms)
            self._cycle(now_ms)
        self.outcome.span_ms = self.clock_ms
        self.outcome.gpu_capacity_ms = self.capacity_milli * self.last_arrival_ms // MILLI
        return self.outcome

    def _pass_time(self, now_ms: int) -> None:
        until = min(now_ms, self.last_arrival_ms)
        if until > self.clock_ms:
            self.outcome.gpu_held_ms += self.held_milli * (until - self.clock_ms) // MILLI
        self.clock_ms = now_ms

    def _arrive(self, name: str, now_ms: int) -> None:
        self.outcome.tasks += 1
        spec = self.arrival_of[name].spec
        if isinstance(admit(spec, self.snapshot), Admitted):
            step(self.snapshot, TaskSubmitted(name, spec), now_ms)
        else:
            self.outcome.refused += 1

    def _end(self, allocation_id: str, now_ms: int) -> None:
        allocation = self.snapshot.allocations.get(allocation_id)
        if allocation is None or allocation.status is AllocationStatus.STOPPING:
            return
        task = allocation.task
        self._report(allocation, AllocationStatus.SUCCEEDED, now_ms)
        self.outcome.finished += task not in self.snapshot.tasks

    def _report(self, allocation: Allocation, status: AllocationStatus, now_ms: int) -> None:
        if status.ended:
            self.held_milli -= allocation.held.gpu_milli
        step(self.snapshot, Report(allocation.node, allocation.id, allocation.token, status, now_ms), now_ms)

    def _cycle(self, now_ms: int) -> None:
        for _ in range(_CYCLES_AT_ONCE):
            plan = schedule(self.snapshot, now_ms)
            if plan.placements or plan.preemptions:
                self._commit(plan, now_ms)
            if not plan.preemptions:
                break
        self._wake(now_ms)

    def _commit(self, plan: Plan, now_ms: int) -> None:
        ids = tuple(f"a-{p.task}-{self.snapshot.tasks[p.task].attempt}-{p.member}" for p in plan.placements)
        step(self.snapshot, Planned(plan, ids), now_ms)
        for id in ids:
            allocation = self.snapshot.allocations[id]
            self.held_milli += allocation.held.gpu_milli
            self._report(allocation, AllocationStatus.RUNNING, now_ms)
            heapq.heappush(self.events, (now_ms + self.arrival_of[allocation.task].runs_ms, _END, id))
            if allocation.member == 0:
                self._started(allocation, now_ms)
        for preemption in plan.preemptions:
            victim = self.snapshot.allocations[preemption.victim]
            since = victim.started_at_ms if victim.started_at_ms is not None else now_ms
            self.outcome.preemptions += 1
            self.outcome.lost_work_ms += victim.held.gpu_milli * (now_ms - since) // MILLI
            self._report(victim, AllocationStatus.CANCELLED, now_ms)

    def _started(self, allocation: Allocation, now_ms: int) -> None:
        arrival = self.arrival_of[allocation.task]
        if allocation.task in self.outcome.started_ms:
            return
        wait = now_ms - arrival.at_ms
        self.outcome.started_ms[allocation.task] = now_ms
        self.outcome.waits_ms.append(wait)
        self.outcome.waits_of[arrival.spec.project].append(wait)

    def _wake(self, now_ms: int) -> None:
        """A task that backs off is looked at again when its time comes."""
        later = [task.not_before_ms for task in self.snapshot.queued.values() if task.not_before_ms > now_ms]
        if later:
            heapq.heappush(self.events, (min(later), _WAKE, ""))


_CYCLES_AT_ONCE = 5
"""Room that victims leave is given out in the next cycle at the same time; a bound, not a wish."""
