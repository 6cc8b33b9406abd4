"""The agent's edge loop: carries leases, reports and heartbeats between the scheduler and the workloads of this node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from crater_agent import machine
from crater_agent.adopt import adopt, exit_of
from crater_agent.link import Link
from crater_agent.probe import Prober
from crater_agent.reconcile import (
    Exit,
    Finish,
    Forget,
    Kill,
    LeaseState,
    Phase,
    Report,
    Settings,
    Start,
    Stop,
    Warn,
    outcome,
    reconcile,
)
from crater_agent.records import Record, Records, is_id
from crater_agent.runtime import ProcessRuntime
from crater_agent.watch import Watcher
from crater_agent.workload import Workload, use_body, want_of
from crater_core.clock import Clock
from crater_core.errors import CraterError, NodeFault, NotFound, SchedulerUnreachable
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.wire.agents import Heartbeat, Lease, NodeDeclaration, ReportBatch, ReportBody

log = logging.getLogger("crater.agent")
POLL_WAIT_S = 25
BACKOFF_S = (0.1, 5.0)
FIRST_CONTACT_S = 2.0
TICK_S = 1.0
REPORTS_MAX = 1_000


@dataclass(slots=True)
class Heard:
    """What the scheduler has said so far."""

    term: int = -1
    revision: int | None = None
    leases: dict[str, Lease] | None = None
    interval_ms: int = 10_000
    timeout_ms: int = 30_000
    renewed_ms: int = 0
    stale: set[tuple[str, int]] = field(default_factory=lambda: set[tuple[str, int]]())


class Agent:
    def __init__(
        self, node: str, declaration: NodeDeclaration, link: Link, runtime: ProcessRuntime, watcher: Watcher, clock: Clock
    ) -> None:
        self.node = node
        self.declaration = declaration
        self.link = link
        self.runtime = runtime
        self.records: Records = runtime.records
        self.watcher = watcher
        self.clock = clock
        self.workloads: dict[str, Workload] = {}
        self.heard = Heard(renewed_ms=clock.monotonic_ms())
        self.settings = Settings(node=node)
        self.prober = Prober(self._health_changed, clock.monotonic_ms)
        self._wake = asyncio.Event()
        self._dirty = asyncio.Event()
        self._registered = asyncio.Event()
        self._unregistered = asyncio.Event()
        self._contacted = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()

    @property
    def registered(self) -> bool:
        return self._registered.is_set()

    # ---- life

    async def run(self) -> None:
        """Until cancelled. Workloads go on when this ends."""
        loops = (self._register(), self._poll(), self._beat(), self._send_reports(), self._decide(), self._tidy())
        try:
            async with asyncio.TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop)
        finally:
            await self.prober.close()

    async def take_over(self) -> None:
        """Find what an earlier agent of this data directory left running or ended."""
        boot_id = self.runtime.place.boot_id
        clock = self.records.load_lease_clock(boot_id)
        if clock is not None:
            self.heard.renewed_ms, self.heard.timeout_ms = clock
        silent_ms = self.lease_state().silent_ms
        for workload in adopt(self.records, self.runtime.spawner.children, boot_id, self.node, silent_ms):
            self.workloads[workload.allocation] = workload
            log.info("took over %s: %s%s", workload.allocation, workload.phase, ", ended meanwhile" if workload.exit else "")
            if workload.exit is not None:
                self._ended(workload)
            self.prober.watch(workload)
        if not any(workload.running for workload in self.workloads.values()):
            self.heard.renewed_ms = self.clock.monotonic_ms()
        strays = await self.runtime.remove_strays([workload.record for workload in self.workloads.values()])
        self.runtime.park()
        if strays:
            log.warning("ended what carried this agent's mark and nobody wanted: %s", ", ".join(strays))
        self._dirty.set()

    async def stop_all(self, patience_s: float) -> None:
        """Ask every workload to end, then kill what has not. For a node that goes away with its agent."""
        for workload in self._running():
            reason = Reason.of(ReasonCode.CANCELLED, by="the agent", why=": its node is being stopped")
            self._stop(Stop(workload.allocation, AllocationStatus.LOST, reason, workload.record.grace_ms))
        deadline_ms = self.clock.monotonic_ms() + int(patience_s * 1000)
        while running := self._running():
            now_ms = self.clock.monotonic_ms()
            for workload in running:
                asked_ms = workload.stop_asked_ms if workload.stop_asked_ms is not None else now_ms
                late = now_ms >= min(deadline_ms, asked_ms + workload.stop_grace_ms)
                if late or workload.exit is not None:
                    self.runtime.kill(workload)
                workload.lives = self.runtime.lives(workload)
                if not workload.lives:
                    self._finish(workload)
            await asyncio.sleep(0.02)
        await self.drain_jobs()

    async def drain_jobs(self) -> None:
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)

    def _running(self) -> list[Workload]:
        return [w for w in self.workloads.values() if w.phase in (Phase.STARTING, Phase.RUNNING, Phase.STOPPING)]

    # ---- what the runtime tells

    def on_exit(self, allocation: str, raw: dict[str, Any]) -> None:
        workload = self.workloads.get(allocation)
        if workload is None or workload.exit is not None:
            return
        if workload.phase is Phase.STARTING:
            # Ended before its start was confirmed: the exit waits on disk until then.
            return
        workload.exit = exit_of(raw)
        self._ended(workload, raw)
        self._wake.set()

    def on_spawner_lost(self) -> None:
        log.error("the spawner is gone: what it started goes on, but exit codes will not be known")
        self._job(self._reconnect())

    async def _reconnect(self) -> None:
        for workload in self.workloads.values():
            workload.orphan = workload.orphan or workload.running
        try:
            await self.runtime.spawner.connect()
        except CraterError as error:
            log.error("no new spawner: %s", error)
        self._wake.set()

    def _ended(self, workload: Workload, raw: dict[str, Any] | None = None) -> None:
        raw = raw or self.records.read_exit(workload.allocation) or {}
        self.watcher.last(workload, int(raw.get("cpu_ms", 0)), int(raw.get("memory_peak_bytes", 0)))
        counters = self.runtime.counters(workload)
        if counters is not None and workload.exit is not None:
            workload.exit = replace(workload.exit, oom_kills=counters.oom_kills)
        workload.lives = self.runtime.lives(workload)

    def _health_changed(self, workload: Workload) -> None:
        self._report(workload, workload.progress(workload.unhealthy))
        self._wake.set()

    # ---- deciding and acting

    def lease_state(self) -> LeaseState:
        return LeaseState(self.clock.monotonic_ms() - self.heard.renewed_ms, self.heard.timeout_ms)

    async def _decide(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._contacted.wait(), FIRST_CONTACT_S)
        while True:
            self._wake.clear()
            self._look_at_orphans()
            self._act()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._patience_s())
            running = self._running()
            if running and not self._wake.is_set():
                now_ms = self.clock.monotonic_ms()
                self.watcher.sample(running, now_ms)
                await self.watcher.sample_disks(running, now_ms)

    def _act(self) -> None:
        wanted = None
        if self.heard.leases is not None:
            leases = self.heard.leases.values()
            wanted = [want_of(lease) for lease in leases if (lease.allocation, lease.token) not in self.heard.stale]
        seen = [workload.seen() for workload in self.workloads.values()]
        now_ms = self.clock.monotonic_ms()
        for action in reconcile(wanted, seen, now_ms, self.lease_state(), self.settings):
            match action:
                case Start(allocation):
                    self._start(allocation)
                case Stop():
                    self._stop(action)
                case Warn(allocation, reason):
                    workload = self.workloads[allocation]
                    workload.over_memory_since_ms = now_ms
                    log.warning("%s will be stopped if it stays so: %s", allocation, sentence(reason))
                    self._report(workload, workload.progress(reason))
                case Kill(allocation):
                    self._kill(self.workloads[allocation])
                case Finish(allocation):
                    self._finish(self.workloads[allocation])
                case Report(allocation, token, status, reason):
                    self._end_unknown(allocation, token, status, reason)
                case Forget(allocation):
                    self._forget(allocation)

    def _patience_s(self) -> float | None:
        running = self._running()
        if not running:
            return None
        fastest = min((0.005 * 2 ** min(w.kills, 6) for w in running if w.kills), default=TICK_S)
        now_ms = self.clock.monotonic_ms()
        limits = [w.record.started_ms + w.record.time_limit_ms for w in running if w.record.time_limit_ms is not None]
        graces = [w.stop_asked_ms + w.stop_grace_ms for w in running if w.stop_asked_ms is not None]
        until_s = min((max(5, due - now_ms) / 1000 for due in limits + graces if due > now_ms), default=TICK_S)
        tick_s = min(TICK_S, self.heard.timeout_ms / 30_000)
        return min(fastest, until_s, tick_s)

    def _start(self, allocation: str) -> None:
        assert self.heard.leases is not None
        lease = self.heard.leases[allocation]
        if not is_id(allocation):
            log.error("a lease with an id that is no name is not taken: %r", allocation)
            return
        past = self.records.past(allocation)
        if past is not None and past.token == lease.token:
            # It ran and ended here, and the scheduler has lost the news.
            self._conclude(Workload(Record(allocation, lease.task, lease.token)), past)
            return
        workload = Workload(self.runtime.record(lease, self.clock.monotonic_ms()))
        self.workloads[allocation] = workload
        self._job(self._start_one(lease, workload))

    async def _start_one(self, lease: Lease, workload: Workload) -> None:
        try:
            await self.runtime.start(lease, workload, self.lease_state())
        except NodeFault as error:
            log.warning("%s (%s) could not be started: %s", workload.allocation, lease.name, error.message)
            again = int(bool(error.fields.get("again")))
            reason = Reason.of(ReasonCode.START_FAILED, node=self.node, why=error.message, retryable=again)
            workload.stop = (AllocationStatus.FAILED, reason)
            workload.lives = False
            self._finish(workload)
            return
        finally:
            self.runtime.park()
        workload.phase = Phase.RUNNING
        self._report(workload, workload.progress())
        log.info("started %s (%s) as pid %d", workload.allocation, lease.name, workload.pid)
        raw = self.records.read_exit(workload.allocation)
        if raw is not None:
            self.on_exit(workload.allocation, raw)
        self.prober.watch(workload)
        # A stop may have come in the meantime.
        self._wake.set()

    def _stop(self, action: Stop) -> None:
        workload = self.workloads[action.allocation]
        log.info("stopping %s: %s", action.allocation, sentence(action.reason))
        workload.stop = (action.status, action.reason)
        workload.stop_asked_ms = self.clock.monotonic_ms()
        workload.stop_grace_ms = action.grace_ms
        workload.phase = Phase.STOPPING
        workload.ready = False
        if action.grace_ms > 0:
            self.runtime.terminate(workload)
        self._wake.set()

    def _kill(self, workload: Workload) -> None:
        workload.kills += 1
        if workload.kills == 1000:
            log.error("%s cannot be killed: a process of it hangs in the kernel", workload.allocation)
        self.runtime.kill(workload)
        workload.lives = self.runtime.lives(workload)

    def _finish(self, workload: Workload) -> None:
        end = workload.exit or Exit(known=False)
        peak_bytes = max(workload.memory_max_bytes, workload.use.memory_peak_bytes)
        facts = {"limit_bytes": workload.record.memory_bytes, "peak_bytes": peak_bytes, "silent_ms": self.lease_state().silent_ms}
        status, reason = outcome(end, workload.stop, facts, self.node)
        final = workload.final(status, reason)
        try:
            self.records.finish(final)
        except OSError as error:
            log.error("the end of %s could not be written to disk: %s", workload.allocation, error)
        log.info("%s ended: %s", workload.allocation, sentence(reason))
        self.prober.forget(workload.allocation)
        self._conclude(workload, final)
        self._job(self._clean(workload.record))

    async def _clean(self, record: Record) -> None:
        if not await self.runtime.clean(record):
            log.warning("the cgroup of %s could not be removed", record.allocation)

    def _end_unknown(self, allocation: str, token: int, status: AllocationStatus, reason: Reason) -> None:
        if not is_id(allocation):
            return
        log.warning("%s is not known here: reported as %s", allocation, status)
        workload = Workload(Record(allocation, "", token))
        self._conclude(workload, workload.final(status, reason))

    def _conclude(self, workload: Workload, end: ReportBody) -> None:
        self.workloads[workload.allocation] = workload
        workload.conclude(end)
        self._dirty.set()

    def _forget(self, allocation: str) -> None:
        workload = self.workloads.pop(allocation)
        self.heard.stale.discard((allocation, workload.record.token))
        self.records.forget(allocation)
        self._wake.set()

    def _look_at_orphans(self) -> None:
        for workload in self.workloads.values():
            if workload.orphan and workload.exit is None and not self.runtime.main_lives(workload):
                raw = self.records.read_exit(workload.allocation)
                workload.exit = exit_of(raw) if raw else Exit(known=False)
                self._ended(workload, raw)

    # ---- the scheduler

    async def _register(self) -> None:
        """Register at the start and whenever the scheduler says that it does not know this node."""
        failures = 0
        while True:
            if self._registered.is_set():
                await self._unregistered.wait()
            sent_ms = self.clock.monotonic_ms()
            try:
                answer = await self.link.register(self.declaration)
            except CraterError as error:
                self._trouble("registering", error, failures, sent_ms)
                failures += 1
                await self._back_off(failures)
                continue
            log.info("registered as %s at %s (term %d)", self.node, self.link.endpoint, answer.term)
            failures = 0
            self.heard.interval_ms, self.heard.timeout_ms = answer.heartbeat_interval_ms, answer.heartbeat_timeout_ms
            self.heard.revision = None
            self._renewed(sent_ms)
            for workload in self.workloads.values():
                # A scheduler that lost the last report, or its memory, hears where everything stands.
                if workload.end is not None:
                    workload.conclude(workload.end)
                elif workload.running and not workload.pending:
                    self._report(workload, workload.progress())
            self._unregistered.clear()
            self._registered.set()
            self._contacted.set()
            self._dirty.set()

    async def _poll(self) -> None:
        failures = 0
        while True:
            await self._registered.wait()
            sent_ms = self.clock.monotonic_ms()
            try:
                answer = await self.link.leases(self.heard.revision, POLL_WAIT_S)
            except CraterError as error:
                failures = await self._after_failure("asking for leases", error, failures, sent_ms)
                continue
            failures = 0
            if answer.term < self.heard.term:
                log.warning("an order of term %d is refused: term %d has been heard", answer.term, self.heard.term)
                await self._back_off(1)
                continue
            self.heard.term, self.heard.revision = answer.term, answer.revision
            self.heard.leases = {lease.allocation: lease for lease in answer.leases}
            self._wake.set()

    async def _beat(self) -> None:
        failures = 0
        while True:
            await self._registered.wait()
            sent_ms = self.clock.monotonic_ms()
            uses = {w.allocation: use_body(w.use) for w in self.workloads.values() if w.running}
            beat = Heartbeat(uses=uses, load_1m=machine.load_1m(), free_disk_bytes=self._free_disk())
            try:
                answer = await self.link.heartbeat(beat, max(1.0, self.heard.interval_ms / 1000))
            except CraterError as error:
                failures = await self._after_failure("sending a heartbeat", error, failures, sent_ms)
                continue
            failures = 0
            if answer.term >= self.heard.term:
                self._renewed(sent_ms)
            await asyncio.sleep(self.heard.interval_ms / 1000)

    async def _send_reports(self) -> None:
        failures = 0
        while True:
            await self._dirty.wait()
            await self._registered.wait()
            self._dirty.clear()
            batch = [(w, report) for w in self.workloads.values() for report in w.pending][:REPORTS_MAX]
            if not batch:
                continue
            sent_ms = self.clock.monotonic_ms()
            try:
                answer = await self.link.report(ReportBatch(reports=tuple(report for _, report in batch)))
            except CraterError as error:
                self._dirty.set()
                failures = await self._after_failure("reporting", error, failures, sent_ms)
                continue
            failures = 0
            self._accepted(batch, set(answer.stale))

    def _accepted(self, batch: list[tuple[Workload, ReportBody]], stale: set[str]) -> None:
        for workload, report in batch:
            if report in workload.pending:
                workload.pending.remove(report)
            if report.status.ended:
                workload.phase = Phase.REPORTED
            if report.allocation in stale and self.workloads.get(report.allocation) is workload:
                self.heard.stale.add((report.allocation, report.token))
        if any(workload.pending for workload in self.workloads.values()):
            self._dirty.set()
        self._wake.set()

    def _report(self, workload: Workload, report: ReportBody) -> None:
        # Of several reports on the way only the newest matters.
        workload.pending = [report]
        self._dirty.set()

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
        await asyncio.sleep(min(most, least * 2 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0))  # noqa: S311

    def _renewed(self, sent_ms: int) -> None:
        if sent_ms < self.heard.renewed_ms:
            return
        self.heard.renewed_ms = sent_ms
        state = self.lease_state()
        self.runtime.spawner.renew(state.kill_at_ms - state.silent_ms)
        with contextlib.suppress(OSError):
            self.records.save_lease_clock(self.runtime.place.boot_id, sent_ms, self.heard.timeout_ms)

    # ---- chores

    def _free_disk(self) -> int:
        with contextlib.suppress(OSError):
            return machine.disk(self.runtime.place.scratch_root).free_bytes
        return 0

    async def _tidy(self) -> None:
        while True:
            await asyncio.to_thread(self.records.remove_old_logs, self.logs_keep_ms)
            await asyncio.sleep(3600)

    logs_keep_ms = 7 * 86_400_000

    def _job(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
