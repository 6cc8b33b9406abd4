"""The agent's own loop: sees what is wanted and what is there, asks `reconcile`, and does what it says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from crater_agent.adopt import exit_of
from crater_agent.gpu_watch import GpuWatch
from crater_agent.mps_daemons import MpsDaemons
from crater_agent.ports import refuse_busy
from crater_agent.probe import Prober
from crater_agent.reconcile import (
    Exit,
    Finish,
    Forget,
    Kill,
    Phase,
    Report,
    Settings,
    Start,
    Stop,
    Warn,
    is_near_disk,
    outcome,
    reconcile,
)
from crater_agent.records import Record, is_id
from crater_agent.runtime import ProcessRuntime
from crater_agent.runtimes import Runtimes
from crater_agent.session import Session
from crater_agent.watch import Watcher
from crater_agent.workload import Workload, want_of
from crater_core.clock import Clock
from crater_core.errors import CraterError, NodeFault
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.wire.agents import Lease, ReportBody

log = logging.getLogger("crater.agent")
FIRST_CONTACT_S = 2.0
TICK_S = 1.0


class Agent:
    """Holds the workloads, asks `reconcile` what is to be done, and does it."""

    def __init__(
        self,
        node: str,
        session: Session,
        workloads: dict[str, Workload],
        processes: ProcessRuntime,
        runtimes: Runtimes,
        watcher: Watcher,
        clock: Clock,
        logs_keep_ms: int,
        gpus: GpuWatch | None = None,
        gpu_idle_warning_ms: int | None = None,
        mps: MpsDaemons | None = None,
    ) -> None:
        self.node = node
        self.session = session
        self.workloads = workloads
        self.processes = processes
        self.runtimes = runtimes
        self.records = processes.records
        self.watcher = watcher
        self.clock = clock
        self._logs_keep_ms = logs_keep_ms
        self.gpus = gpus
        self.mps = mps
        self._settings = Settings(node=node, gpu_idle_warning_ms=gpu_idle_warning_ms)
        self._wake = asyncio.Event()
        self._prober = Prober(self._health_changed, clock.monotonic_ms)
        self._jobs: set[asyncio.Task[None]] = set()
        self._unwritten: list[tuple[Workload, ReportBody]] = []
        """Ends that are not on the disk yet."""
        session.on_change = self._wake.set
        if gpus is not None:
            gpus.on_change, gpus.on_trouble, gpus.on_health = self._wake.set, self._report, self._gpu_health
        if mps is not None:
            mps.on_change, mps.on_fault = self._wake.set, self._mps_fault

    # ---- life

    async def run(self) -> None:
        """Until cancelled. Workloads go on when this ends."""
        try:
            async with asyncio.TaskGroup() as group:
                for loop in (self.session.run(), self._decide(), self._tidy()):
                    group.create_task(loop)
                if self.gpus is not None:
                    group.create_task(self.gpus.attend())
                if self.mps is not None:
                    group.create_task(self.mps.attend())
        finally:
            await self._prober.close()

    async def take_over(self) -> None:
        """Find what an earlier agent of this data directory left running or ended."""
        self.session.resume()
        for workload in await self.runtimes.adopt(self.records.read_all(), self.session.lease_state().silent_ms):
            self.workloads[workload.allocation] = workload
            log.info("took over %s: %s%s", workload.allocation, workload.phase, ", ended meanwhile" if workload.exit else "")
            if workload.exit is not None:
                self._ended(workload)
            self._prober.watch(workload)
        if self.mps is not None:
            self.mps.adopt(self.workloads.values())
        if not any(workload.running for workload in self.workloads.values()):
            self.session.begin_anew()
        strays = await self.runtimes.remove_strays([workload.record for workload in self.workloads.values()])
        self.processes.park()
        if strays:
            log.warning("ended what carried this agent's mark and nobody wanted: %s", ", ".join(strays))
        self.session.report_soon()

    async def stop_all(self, patience_s: float) -> None:
        """Ask every workload to end, then kill what has not. For a node that goes away with its agent."""
        await self.drain_jobs()
        for workload in self._running():
            reason = Reason.of(ReasonCode.NODE_LOST, node=self.node, silent_ms=self.session.lease_state().silent_ms)
            self._stop(Stop(workload.allocation, AllocationStatus.LOST, reason, workload.record.grace_ms))
        deadline_ms = self.clock.monotonic_ms() + int(patience_s * 1000)
        while running := self._running():
            now_ms = self.clock.monotonic_ms()
            for workload in running:
                asked_ms = workload.stop_asked_ms if workload.stop_asked_ms is not None else now_ms
                late = now_ms >= min(deadline_ms, asked_ms + workload.stop_grace_ms)
                if late or workload.exit is not None:
                    self._kill(workload)
                workload.lives = self.runtimes.of(workload.record).lives(workload)
                if not workload.lives:
                    self._finish(workload)
            await asyncio.sleep(0.02)
        await self.drain_jobs()
        if self.mps is not None:
            await self.mps.close()
        await self.session.flush()

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

    def on_progress(self, workload: Workload, reason: Reason) -> None:
        """Its start takes a while; `reason` says why."""
        self._report(workload, reason)

    def on_spawner_lost(self) -> None:
        log.error("the spawner is gone: what it started goes on, but exit codes will not be known")
        self._job(self._reconnect())

    async def _reconnect(self) -> None:
        for workload in self.workloads.values():
            workload.orphan = workload.orphan or (workload.running and workload.record.runtime == self.processes.name)
        try:
            await self.processes.spawner.connect()
        except CraterError as error:
            log.error("no new spawner: %s", error)
        self._wake.set()

    def _ended(self, workload: Workload, raw: dict[str, Any] | None = None) -> None:
        raw = raw or self.records.read_exit(workload.allocation) or {}
        counters = self.watcher.last(workload, int(raw.get("cpu_ms", 0)), int(raw.get("memory_peak_bytes", 0)))
        if counters is not None and workload.exit is not None:
            workload.exit = replace(workload.exit, oom_kills=counters.oom_kills)
        if workload.exit is not None:
            workload.exit = replace(workload.exit, disk_full=workload.disk_full)
        workload.lives = self.runtimes.of(workload.record).lives(workload)

    def _health_changed(self, workload: Workload) -> None:
        self.records.set_ready(workload.allocation, workload.ready)
        self._report(workload, workload.unhealthy)
        self._wake.set()

    def _gpu_health(self, unwell: Mapping[str, str]) -> None:
        declaration = self.session.declaration
        devices = tuple(
            device.model_copy(update={"healthy": device.uuid not in unwell, "unwell": unwell.get(device.uuid, "")[:1000]})
            for device in declaration.devices
        )
        if devices != declaration.devices:
            self.session.declare(declaration.model_copy(update={"devices": devices}))

    def _mps_fault(self, allocation: str, reason: Reason) -> None:
        workload = self.workloads.get(allocation)
        if workload is not None and workload.gpu_fault is None:
            workload.gpu_fault, workload.gpu_fault_stops = reason, True
            self._wake.set()

    # ---- deciding and acting

    async def _decide(self) -> None:
        # (asyncio.wait_for of Python 3.11 loses a cancellation that comes together with the event.)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CONTACT_S):
                await self.session.contacted.wait()
        while True:
            self._wake.clear()
            try:
                self._look_at_orphans()
                self._act()
            except OSError:
                # One workload's trouble (a full disk, a cgroup that vanished) must not end the care for the others.
                log.exception("acting on a workload failed; it is tried again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience_s()):
                    await self._wake.wait()
            running = self._running()
            if running and not self._wake.is_set():
                now_ms = self.clock.monotonic_ms()
                warned = [workload for workload in running if workload.is_warned]
                self.watcher.sample(running, now_ms)
                await self.watcher.sample_disks(running, now_ms)
                self._calm(warned)

    def _act(self) -> None:
        wanted = None
        heard = self.session.heard
        if heard.leases is not None:
            leases = heard.leases.values()
            wanted = [want_of(lease) for lease in leases if (lease.allocation, lease.token) not in heard.stale]
        seen = [workload.seen() for workload in self.workloads.values()]
        now_ms = self.clock.monotonic_ms()
        for action in reconcile(wanted, seen, now_ms, self.session.lease_state(), self._settings):
            match action:
                case Start(allocation):
                    self._start(allocation)
                case Stop():
                    self._stop(action)
                case Warn(allocation, reason):
                    self._warn(self.workloads[allocation], reason, now_ms)
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
        tick_s = min(TICK_S, self.session.heard.timeout_ms / 30_000)
        return min(fastest, until_s, tick_s)

    def _start(self, allocation: str) -> None:
        assert self.session.heard.leases is not None
        lease = self.session.heard.leases[allocation]
        if not is_id(allocation):
            log.error("a lease with an id that is no name is not taken: %r", allocation)
            return
        past = self.records.past(allocation)
        if past is not None and past.token == lease.token:
            # It ran and ended here, and the scheduler has lost the news.
            self._conclude(Workload(Record(allocation, lease.task, lease.token)), past)
            return
        workload = Workload(self.runtimes.for_lease(lease).record(lease, self.clock.monotonic_ms()))
        self.workloads[allocation] = workload
        self._job(self._start_one(lease, workload))

    async def _start_one(self, lease: Lease, workload: Workload) -> None:
        try:
            refuse_busy(lease.ports)
            if self.gpus is not None:
                await self.gpus.ready_for(lease)
            if self.mps is not None:
                await self.mps.ready_for(lease)
            await self.runtimes.for_lease(lease).start(lease, workload, self.session.lease_state())
        except NodeFault as error:
            log.warning("%s (%s) could not be started: %s", workload.allocation, lease.name, error.message)
            again = int(bool(error.fields.get("again")))
            reason = Reason.of(ReasonCode.START_FAILED, node=self.node, why=error.message, retryable=again)
            # One that was told to stop while its image was on the way ends as what it was told.
            workload.stop = workload.stop or (AllocationStatus.FAILED, reason)
            workload.lives = False
            self._finish(workload)
            return
        finally:
            self.processes.park()
        if workload.phase is Phase.STARTING:
            workload.phase = Phase.RUNNING
        self._report(workload)
        log.info("started %s (%s) as pid %d", workload.allocation, lease.name, workload.pid)
        raw = self.records.read_exit(workload.allocation)
        if raw is not None:
            self.on_exit(workload.allocation, raw)
        self._prober.watch(workload)
        # A stop may have come in the meantime.
        self._wake.set()

    def _warn(self, workload: Workload, reason: Reason, now_ms: int) -> None:
        match reason.code:
            case ReasonCode.OVER_MEMORY:
                workload.over_memory_since_ms = now_ms
            case ReasonCode.OVER_GPU_MEMORY:
                workload.over_gpu_memory_since_ms = now_ms
            case ReasonCode.GPU_IDLE:
                workload.gpu_idle_warned = True
            case _:
                workload.over_disk_since_ms = now_ms
        log.warning("%s: %s", workload.allocation, sentence(reason))
        self._report(workload, reason)

    def _calm(self, warned: list[Workload]) -> None:
        """What a warning was about may have passed."""
        for workload in warned:
            if not is_near_disk(workload.seen(), self._settings):
                workload.over_disk_since_ms = None
            seen = workload.seen()
            if seen.gpu_memory_limit_mib is None or seen.gpu_memory_mib <= seen.gpu_memory_limit_mib:
                workload.over_gpu_memory_since_ms = None
            workload.gpu_idle_warned &= workload.gpu_idle_since_ms is not None
            if workload.running and not workload.is_warned:
                self._report(workload)

    def _stop(self, action: Stop) -> None:
        workload = self.workloads[action.allocation]
        log.info("stopping %s: %s", action.allocation, sentence(action.reason))
        workload.stop = (action.status, action.reason)
        workload.stop_asked_ms = self.clock.monotonic_ms()
        workload.stop_grace_ms = action.grace_ms
        workload.phase = Phase.STOPPING
        workload.ready = False
        if action.grace_ms > 0:
            self.runtimes.of(workload.record).terminate(workload)
        self._wake.set()

    def _kill(self, workload: Workload) -> None:
        runtime = self.runtimes.of(workload.record)
        if self.mps is not None and not self.mps.let_go(workload.record, runtime.pids(workload)):
            return  # It comes back here once they are.
        workload.kills += 1
        if workload.kills == 1000:
            log.error("%s cannot be killed: a process of it hangs in the kernel", workload.allocation)
        runtime.kill(workload)
        workload.lives = runtime.lives(workload)

    def _finish(self, workload: Workload) -> None:
        end = workload.exit or Exit(known=False)
        peak_bytes = max(workload.memory_max_bytes, workload.use.memory_peak_bytes)
        facts = {
            "limit_bytes": workload.record.memory_bytes,
            "peak_bytes": peak_bytes,
            "disk_limit_bytes": workload.record.disk_bytes,
            "disk_bytes": workload.use.disk_bytes,
            "silent_ms": self.session.lease_state().silent_ms,
        }
        status, reason = outcome(end, workload.stop, facts, self.node, workload.gpu_fault)
        if self.gpus is not None:
            self.gpus.released(workload.record)
        if self.mps is not None:
            self.mps.released(workload.record)
        workload.phase, workload.lives = Phase.ENDED, False
        log.info("%s ended: %s", workload.allocation, sentence(reason))
        self._prober.forget(workload.allocation)
        self._unwritten.append((workload, workload.final(status, reason)))
        if len(self._unwritten) == 1:
            self._job(self._write_ends())
        self._job(self._clean(workload.record, failed=status is AllocationStatus.FAILED))

    async def _write_ends(self) -> None:
        """Ends that come together wait for the disk together, and are reported after it."""
        while self._unwritten:
            batch = tuple(self._unwritten)
            try:
                await asyncio.to_thread(self.records.finish([final for _, final in batch]))
            except OSError as error:
                log.error("the end of %s could not be written to disk: %s", ", ".join(w.allocation for w, _ in batch), error)
            del self._unwritten[: len(batch)]
            for workload, final in batch:
                self._conclude(workload, final)

    async def _clean(self, record: Record, failed: bool) -> None:
        if failed:
            await asyncio.to_thread(self.processes.scratch.keep, record)
        if not await self.runtimes.of(record).clean(record):
            log.warning("what is left of %s could not be removed yet", record.allocation)

    def _end_unknown(self, allocation: str, token: int, status: AllocationStatus, reason: Reason) -> None:
        if not is_id(allocation):
            return
        log.warning("%s is not known here: reported as %s", allocation, status)
        workload = Workload(Record(allocation, "", token))
        self._conclude(workload, workload.final(status, reason))

    def _conclude(self, workload: Workload, end: ReportBody) -> None:
        self.workloads[workload.allocation] = workload
        workload.conclude(end)
        self.session.report_soon()

    def _report(self, workload: Workload, reason: Reason | None = None) -> None:
        # Of several reports on the way only the newest matters.
        workload.pending = [workload.progress(reason)]
        self.session.report_soon()

    def _forget(self, allocation: str) -> None:
        workload = self.workloads.pop(allocation)
        self.session.heard.stale.discard((allocation, workload.record.token))
        self.records.forget(allocation)
        self._wake.set()

    def _look_at_orphans(self) -> None:
        for workload in self.workloads.values():
            if workload.orphan and workload.exit is None and not self.processes.main_lives(workload):
                raw = self.records.read_exit(workload.allocation)
                workload.exit = exit_of(raw) if raw else Exit(known=False)
                self._ended(workload, raw)

    # ---- chores

    async def _tidy(self) -> None:
        while True:
            await asyncio.to_thread(self.records.remove_old_logs, self._logs_keep_ms)
            await asyncio.to_thread(self.processes.scratch.remove_old)
            await asyncio.sleep(3600)

    def _job(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
