"""Replays arrivals and ends on a virtual clock through `admit`, `schedule` and `apply`, and measures what came of it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from crater_core.lifecycle.inputs import NodeRegistered, Planned, PolicySet, Report, TaskSubmitted
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.plan import Admitted, Plan
from crater_core.model.quota import QuotaPolicy
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.units import MILLI
from crater_core.scheduling import admit, schedule
from crater_core.simulation.fill import step
from crater_core.simulation.outcome import Outcome, Run, Sample, joined
from crater_core.simulation.traces import Arrival, Trace, split_by_project

_END, _ARRIVE, _WAKE = range(3)
SAMPLES = 500
"""How many points of time an outcome keeps, about."""
Progress = Callable[[int, int], object]
"""Hears how many arrivals of how many have been replayed."""


def simulate(
    trace: Trace,
    settings: Settings,
    policies: Iterable[QuotaPolicy] = (),
    *,
    name: str | None = None,
    until_ms: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a whole trace. Deterministic: the same arguments give the same outcome.

    Ratios are measured up to `until_ms`, else up to the last arrival. KeyboardInterrupt ends it early, with what there is.
    """
    return _Replay(trace, settings, policies, name or settings.strategy, until_ms, progress).run()


def simulate_partitions(
    trace: Trace, settings: Settings, *, name: str | None = None, progress: Progress | None = None
) -> Outcome:
    """The same tasks where each project owns nodes of its own (see `split_by_project`)."""
    until_ms = max((arrival.at_ms for arrival in trace.arrivals), default=0)
    outcomes: list[Outcome] = []
    before = 0
    for part in split_by_project(trace):
        so_far = before

        def told(done: int, _: int, so_far: int = so_far) -> None:
            if progress is not None:
                progress(so_far + done, len(trace.arrivals))

        outcomes.append(simulate(part, settings, until_ms=until_ms, progress=told))
        before += len(part.arrivals)
        if outcomes[-1].interrupted:
            break
    return joined(outcomes, trace.name, name or f"{settings.strategy}, partitioned")


class _Replay:
    def __init__(
        self,
        trace: Trace,
        settings: Settings,
        policies: Iterable[QuotaPolicy],
        name: str,
        until_ms: int | None,
        progress: Progress | None,
    ) -> None:
        self.snapshot = Snapshot(settings=settings)
        gpus = sum(len(node.devices) for node in trace.nodes)
        self.outcome = Outcome(trace.name, name, "gpu" if gpus else "cpu")
        for node in trace.nodes:
            step(self.snapshot, NodeRegistered(node), 0)
        for policy in policies:
            step(self.snapshot, PolicySet(policy), 0)
        cores_milli = sum(node.allocatable.cpu_milli for node in trace.nodes)
        self.outcome.capacity_milli = MILLI * gpus if gpus else cores_milli
        self.held_milli = 0
        self.clock_ms = 0
        last_ms = max((arrival.at_ms for arrival in trace.arrivals), default=0)
        self.until_ms = last_ms if until_ms is None else until_ms
        self._saved_ms: dict[str, int] = {}
        """By task that was stopped: how much of its run time it need not run again."""
        self.arrival_of: dict[str, Arrival] = {f"t{i:07d}": arrival for i, arrival in enumerate(trace.arrivals)}
        self.events: list[tuple[int, int, str]] = [(arrival.at_ms, _ARRIVE, name) for name, arrival in self.arrival_of.items()]
        heapq.heapify(self.events)
        self._progress = progress
        self._woken_at_ms = -1
        lent = any(policy.lend for policy in self.snapshot.policies.values())
        self._patience_ms = settings.reclaim_after_ms if lent else 0
        """How long after it came a task may take back what is lent: then the queue is looked at."""

    def run(self) -> Outcome:
        try:
            while self.events:
                self._moment(self.events[0][0])
        except KeyboardInterrupt:
            self.outcome.interrupted = True
        outcome = self.outcome
        outcome.span_ms = self.clock_ms
        outcome.capacity_ms = outcome.capacity_milli * min(self.until_ms, self.clock_ms) // MILLI
        return outcome

    def _moment(self, now_ms: int) -> None:
        """Everything that happens at one time, then a look at the queue."""
        self._pass_time(now_ms)
        while self.events and self.events[0][0] == now_ms:
            _, kind, name = heapq.heappop(self.events)
            if kind == _ARRIVE:
                self._arrive(name, now_ms)
            elif kind == _END:
                self._end(name, now_ms)
        self._cycle(now_ms)
        samples = self.outcome.samples
        if not samples or now_ms - samples[-1].at_ms >= self.until_ms // SAMPLES:
            samples.append(Sample(now_ms, self.held_milli, len(self.snapshot.queued)))

    def _pass_time(self, now_ms: int) -> None:
        lasts_ms = min(now_ms, self.until_ms) - self.clock_ms
        if lasts_ms > 0:
            self.outcome.held_ms += self.held_milli * lasts_ms // MILLI
            if self.snapshot.queued:
                self.outcome.idle_while_waiting_ms += (self.outcome.capacity_milli - self.held_milli) * lasts_ms // MILLI
        self.clock_ms = now_ms

    def _arrive(self, name: str, now_ms: int) -> None:
        self.outcome.tasks += 1
        spec = self.arrival_of[name].spec
        if isinstance(admit(spec, self.snapshot), Admitted):
            step(self.snapshot, TaskSubmitted(name, spec), now_ms)
            if self._patience_ms:
                heapq.heappush(self.events, (now_ms + self._patience_ms, _WAKE, ""))
        else:
            self.outcome.refused += 1
        if self._progress is not None:
            self._progress(self.outcome.tasks, len(self.arrival_of))

    def _end(self, allocation_id: str, now_ms: int) -> None:
        allocation = self.snapshot.allocations.get(allocation_id)
        if allocation is None or allocation.status is AllocationStatus.STOPPING:
            return
        task = allocation.task
        self._report(allocation, AllocationStatus.SUCCEEDED, now_ms)
        if task not in self.snapshot.tasks:
            arrival = self.arrival_of[task]
            wait_ms = now_ms - arrival.at_ms - arrival.runs_ms
            self.outcome.finished += 1
            until_start_ms = self.outcome.started_ms[task] - arrival.at_ms
            self.outcome.runs.append(Run(arrival.spec.project, arrival.at_ms, wait_ms, arrival.runs_ms, until_start_ms))

    def _report(self, allocation: Allocation, status: AllocationStatus, now_ms: int) -> None:
        if status.ended:
            self.held_milli -= self._measured(allocation)
        step(self.snapshot, Report(allocation.node, allocation.id, allocation.token, status, now_ms), now_ms)

    def _measured(self, allocation: Allocation) -> int:
        return allocation.held.gpu_milli if self.outcome.resource == "gpu" else allocation.held.cpu_milli

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
            self.held_milli += self._measured(allocation)
            self._report(allocation, AllocationStatus.RUNNING, now_ms)
            left_ms = self.arrival_of[allocation.task].runs_ms - self._saved_ms.get(allocation.task, 0)
            heapq.heappush(self.events, (now_ms + left_ms, _END, id))
            self.outcome.started_ms.setdefault(allocation.task, now_ms)
        victims = [self.snapshot.allocations[preemption.victim] for preemption in plan.preemptions]
        self.outcome.preemptions += len(victims)
        saved_ms = {victim.task: self._save(victim, now_ms) for victim in victims}
        for task, ms in saved_ms.items():
            self._saved_ms[task] = self._saved_ms.get(task, 0) + ms
        for victim in victims:
            self._report(victim, AllocationStatus.CANCELLED, now_ms)

    def _save(self, victim: Allocation, now_ms: int) -> int:
        """How much of the time that it ran is kept; the rest is counted as lost."""
        ran_ms = now_ms - victim.started_at_ms if victim.started_at_ms is not None else 0
        every_ms = self.snapshot.tasks[victim.task].spec.checkpoint_every_ms
        kept_ms = 0 if every_ms is None else ran_ms - ran_ms % every_ms if every_ms else ran_ms
        self.outcome.lost_work_ms += self._measured(victim) * (ran_ms - kept_ms) // MILLI
        return kept_ms

    def _wake(self, now_ms: int) -> None:
        """A task that backs off is looked at again when its time comes."""
        later = [task.not_before_ms for task in self.snapshot.queued.values() if task.not_before_ms > now_ms]
        if later and min(later) != self._woken_at_ms:
            self._woken_at_ms = min(later)
            heapq.heappush(self.events, (self._woken_at_ms, _WAKE, ""))


_CYCLES_AT_ONCE = 5
"""Room that victims leave is given out in the next cycle at the same time; a bound, not a wish."""
