"""The conversation with the scheduler: registers, polls leases, beats, reports, and knows when the lease was last renewed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from crater_agent import machine
from crater_agent.link import Link
from crater_agent.reconcile import LeaseState, Phase
from crater_agent.runtime import ProcessRuntime
from crater_agent.workload import Workload, use_body
from crater_core.clock import Clock
from crater_core.errors import CraterError, NotFound, SchedulerUnreachable
from crater_core.wire.agents import Heartbeat, Lease, NodeDeclaration, ReportBatch, ReportBody

log = logging.getLogger("crater.agent.session")
POLL_WAIT_S = 25
BACKOFF_S = (0.1, 5.0)
REPORTS_MAX = 1_000
FLUSH_S = 2.0


@dataclass(slots=True)
class Heard:
    """What the scheduler has said so far."""

    term: int = -1
    revision: int | None = None
    leases: dict[str, Lease] | None = None
    interval_ms: int = 10_000
    timeout_ms: int = 30_000
    renewed_ms: int = 0
    lapses: int = 0
    """How often the lease has run out: the scheduler may have given this node's work away, and what it said before is void."""
    stale: set[tuple[str, int]] = field(default_factory=lambda: set[tuple[str, int]]())
    """Allocations and tokens that a report was refused for: somebody else's by now."""


class Session:
    """Runs beside the agent's own loop; `on_change` wakes that one when something was heard."""

    def __init__(
        self,
        declaration: NodeDeclaration,
        link: Link,
        runtime: ProcessRuntime,
        workloads: Mapping[str, Workload],
        clock: Clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.declaration = declaration
        self.link = link
        self.heard = Heard(renewed_ms=clock.monotonic_ms())
        self.on_change: Callable[[], None] = lambda: None
        self.contacted = asyncio.Event()
        self.round_trip_ms: int | None = None
        """Of the last heartbeat; None before the first."""
        self._runtime = runtime
        self._workloads = workloads
        self._clock = clock
        self._chance = chance
        self._dirty = asyncio.Event()
        self._registered = asyncio.Event()
        self._unregistered = asyncio.Event()

    @property
    def registered(self) -> bool:
        return self._registered.is_set()

    def lease_state(self) -> LeaseState:
        return LeaseState(self._clock.monotonic_ms() - self.heard.renewed_ms, self.heard.timeout_ms)

    def resume(self) -> None:
        """Go on from where an earlier agent of this data directory was, if this is still the same boot."""
        clock = self._runtime.records.load_lease_clock(self._runtime.place.boot_id)
        if clock is not None:
            self.heard.renewed_ms, self.heard.timeout_ms = clock

    def begin_anew(self) -> None:
        """Nothing runs that an old lease could be about."""
        self.heard.renewed_ms = self._clock.monotonic_ms()

    def declare(self, declaration: NodeDeclaration) -> None:
        """Register anew: what this node can do has changed."""
        self.declaration = declaration
        if self._registered.is_set():
            self._registered.clear()
            self._unregistered.set()

    def report_soon(self) -> None:
        """Some workload has something new in `pending`."""
        self._dirty.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for loop in (self._register(), self._poll(), self._beat(), self._send_reports()):
                group.create_task(loop)

    async def flush(self) -> None:
        """One last try to tell what has ended, for an agent that takes its workloads with it."""
        batch = self._pending()
        if batch:
            with contextlib.suppress(CraterError, TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    answer = await self.link.report(ReportBatch(reports=tuple(report for _, report in batch)))
                self._accepted(batch, set(answer.stale))

    async def _register(self) -> None:
        """Register at the start and whenever the scheduler says that it does not know this node."""
        failures = 0
        while True:
            if self._registered.is_set():
                await self._unregistered.wait()
            sent_ms, told = self._clock.monotonic_ms(), self.declaration
            try:
                answer = await self.link.register(told)
            except CraterError as error:
                self._trouble("registering", error, failures, sent_ms)
                failures += 1
                await self._back_off(failures)
                continue
            log.info("registered as %s at %s (term %d)", self.link.node, self.link.endpoint, answer.term)
            failures = 0
            if told is not self.declaration:
                # It changed while this was on its way.
                continue
            self.heard.interval_ms, self.heard.timeout_ms = answer.heartbeat_interval_ms, answer.heartbeat_timeout_ms
            self.heard.revision = None
            self._renewed(sent_ms)
            for workload in self._workloads.values():
                # A scheduler that lost the last report, or its memory, hears where everything stands.
                if workload.end is not None:
                    workload.conclude(workload.end)
                elif workload.running and not workload.pending:
                    workload.pending = [workload.progress()]
            self._unregistered.clear()
            self._registered.set()
            self.contacted.set()
            self._dirty.set()

    async def _poll(self) -> None:
        failures = 0
        while True:
            await self._registered.wait()
            sent_ms, lapses = self._clock.monotonic_ms(), self.heard.lapses
            try:
                answer = await self.link.leases(self.heard.revision, POLL_WAIT_S)
            except CraterError as error:
                failures = await self._after_failure("asking for leases", error, failures, sent_ms)
                continue
            failures = 0
            if lapses != self.heard.lapses:
                continue
            if answer.term < self.heard.term:
                log.warning("an order of term %d is refused: term %d has been heard", answer.term, self.heard.term)
                await self._back_off(1)
                continue
            self.heard.term, self.heard.revision = answer.term, answer.revision
            self.heard.leases = {lease.allocation: lease for lease in answer.leases}
            self.on_change()

    async def _beat(self) -> None:
        failures = 0
        while True:
            await self._registered.wait()
            sent_ms = self._clock.monotonic_ms()
            uses = {w.allocation: use_body(w.use) for w in self._workloads.values() if w.running}
            beat = Heartbeat(uses=uses, load_1m=machine.load_1m(), free_disk_bytes=self._free_disk())
            try:
                answer = await self.link.heartbeat(beat, max(1.0, self.heard.interval_ms / 1000))
            except CraterError as error:
                failures = await self._after_failure("sending a heartbeat", error, failures, sent_ms)
                continue
            failures = 0
            self.round_trip_ms = self._clock.monotonic_ms() - sent_ms
            if answer.term >= self.heard.term:
                self._renewed(sent_ms)
            await asyncio.sleep(self.heard.interval_ms / 1000)

    async def _send_reports(self) -> None:
        failures = 0
        while True:
            await self._dirty.wait()
            await self._registered.wait()
            self._dirty.clear()
            batch = self._pending()
            if not batch:
                continue
            sent_ms = self._clock.monotonic_ms()
            try:
                answer = await self.link.report(ReportBatch(reports=tuple(report for _, report in batch)))
            except CraterError as error:
                self._dirty.set()
                failures = await self._after_failure("reporting", error, failures, sent_ms)
                continue
            failures = 0
            self._accepted(batch, set(answer.stale))

    def _pending(self) -> list[tuple[Workload, ReportBody]]:
        return [(workload, report) for workload in self._workloads.values() for report in workload.pending][:REPORTS_MAX]

    def _accepted(self, batch: list[tuple[Workload, ReportBody]], stale: set[str]) -> None:
        for workload, report in batch:
            if report in workload.pending:
                workload.pending.remove(report)
            if report.status.ended:
                workload.phase = Phase.REPORTED
            if report.allocation in stale and self._workloads.get(report.allocation) is workload:
                self.heard.stale.add((report.allocation, report.token))
        if any(workload.pending for workload in self._workloads.values()):
            self._dirty.set()
        self.on_change()

    async def _after_failure(self, what: str, error: CraterError, failures: int, sent_ms: int) -> int:
        if isinstance(error, NotFound):
            self._registered.clear()
            self._unregistered.set()
            return 0
        self._trouble(what, error, failures, sent_ms)
        await self._back_off(failures + 1)
        return failures + 1

    def _trouble(self, what: str, error: CraterError, failures: int, sent_ms: int) -> None:
        if isinstance(error, SchedulerUnreachable) and error.fields.get("proof"):
            # Nobody listens there, so nobody gives this node's work away: the lease's clock stands still.
            self._renewed(sent_ms)
        level = logging.WARNING if failures in (0, 5) or failures % 60 == 0 else logging.DEBUG
        log.log(level, "%s failed, trying again: %s", what, error.message)

    async def _back_off(self, failures: int) -> None:
        least, most = BACKOFF_S
        most = min(most, self.heard.interval_ms / 1000)
        await asyncio.sleep(min(most, least * 2 ** min(failures - 1, 10)) * (0.5 + self._chance() / 2))

    def _renewed(self, sent_ms: int) -> None:
        if sent_ms < self.heard.renewed_ms:
            return
        state = self.lease_state()
        if state.silent_ms >= state.kill_at_ms:
            self.heard.lapses += 1
            self._forget_leases()
        self.heard.renewed_ms = sent_ms
        state = self.lease_state()
        self._runtime.spawner.renew(state.kill_at_ms - state.silent_ms)
        with contextlib.suppress(OSError):
            self._runtime.records.save_lease_clock(self._runtime.place.boot_id, sent_ms, self.heard.timeout_ms)

    def _forget_leases(self) -> None:
        """Until the list is heard anew nothing is started, and nothing counts as unwanted."""
        self.heard.leases = self.heard.revision = None

    def _free_disk(self) -> int:
        with contextlib.suppress(OSError):
            return machine.disk(self._runtime.place.scratch_root).free_bytes
        return 0
