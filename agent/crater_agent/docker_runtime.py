"""Runs tasks that have an image as containers of this machine's engine, and finds them again after a restart of either side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from crater_agent import cgroup, device_probe, proctree
from crater_agent.adopt import exit_of
from crater_agent.cgroup import Counters
from crater_agent.config import Docker
from crater_agent.docker_engine import Container, Engine, EngineAway
from crater_agent.docker_images import Images
from crater_agent.docker_mounts import binds_of
from crater_agent.docker_output import Follower
from crater_agent.docker_spec import EngineFacts, container_environment, creation, refuse_image
from crater_agent.forked import start_ticks, write_record
from crater_agent.reconcile import Exit, LeaseState, Phase
from crater_agent.records import Kept, Record, Records, record_of
from crater_agent.runtime import Identity, Place
from crater_agent.scratch import Scratch
from crater_agent.spawner import Spawner
from crater_agent.workload import Workload
from crater_core.errors import RuntimeFailed
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.wire.agents import Lease

log = logging.getLogger("crater.agent.docker")
T = TypeVar("T")
CALLS_AT_ONCE = 8
LOOK_S = (0.2, 5.0)
"""How soon an engine that went away is looked for again, at first and at most."""
AWAY_S = 5.0
"""An engine that is away for longer than a restart takes is no longer offered."""
GIVEN_UP_S = 20.0
"""A container whose processes are gone while its engine stays away so long has ended with it."""
OUTPUT_PATIENCE_S = 10.0
BY_THE_ENGINE = (128 + signal.SIGKILL, 128 + signal.SIGTERM, 255)
"""Exit codes of containers that an engine takes down with itself."""


@dataclass(slots=True)
class Run:
    """One container that this agent has, from before it is made until it is removed."""

    record: Record
    name: str
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to end before it has begun."""
    began: bool = False
    ended: bool = False
    ending: bool = False
    asked: bool = False
    """We have signalled it."""
    signals: set[signal.Signals] = field(default_factory=set[signal.Signals])
    """On their way to it."""
    pid: int = 0
    start_ticks: int = 0
    upper_dir: str = ""
    group: cgroup.Group | None = None
    counters: Counters | None = None
    followers: list[Follower] = field(default_factory=lambda: [])


class DockerRuntime:
    """`on_exit(allocation, raw)` is called when one has ended and its output is whole; `on_offer(yes)` when the engine
    has come or has stayed away; `on_progress(workload, reason)` while an image is fetched."""

    name = "docker"

    def __init__(
        self,
        place: Place,
        records: Records,
        spawner: Spawner,
        settings: Docker,
        mark: str,
        on_exit: Callable[[str, dict[str, Any]], None],
        on_progress: Callable[[Workload, Reason], None],
        on_offer: Callable[[bool], None],
    ) -> None:
        self.records = records
        self.facts: EngineFacts | None = None
        self._place, self._spawner, self._settings, self._mark = place, spawner, settings, mark
        self._on_exit, self._on_offer = on_exit, on_offer
        self._engine = Engine(str(settings.socket), mark)
        self._scratch = Scratch(place.scratch_root)
        self._images = Images(self._engine, settings, place.host.node, self._call, on_progress)
        self._calls = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="docker")
        self._runs: dict[str, Run] = {}
        self._jobs: set[asyncio.Task[None]] = set()
        self._away_since = time.monotonic()
        self._offered = False
        self._why = ""

    # ---- the engine

    @property
    def identity(self) -> Identity | None:
        """Only a root agent lets an image choose its user: another one could not clean up after it."""
        if self._place.identity is not None or os.geteuid() == 0:
            return self._place.identity
        return Identity(os.geteuid(), os.getegid(), (), "")

    async def open(self) -> EngineFacts | None:
        """A first look. None: no engine can be used now, `why_not` says why."""
        await self._connect()
        self._offered = self.facts is not None
        return self.facts

    @property
    def why_not(self) -> str:
        return self._why

    async def attend(self) -> None:
        """Until cancelled: hears what ends, and finds the engine again when it was away."""
        delay_s = LOOK_S[0]
        while True:
            if self.facts is not None or await self._connect():
                delay_s = LOOK_S[0]
                if not self._offered:
                    self._offered = True
                    self._on_offer(True)
                await self._listen()
                self.facts, self._away_since = None, time.monotonic()
                log.warning("the container engine at %s is away; its containers are left alone", self._settings.socket)
            away_s = time.monotonic() - self._away_since
            if self._offered and away_s > AWAY_S:
                self._offered = False
                self._on_offer(False)
            if away_s > GIVEN_UP_S:
                self._look_without_engine()
            await asyncio.sleep(delay_s)
            delay_s = min(LOOK_S[1], delay_s * 2)

    async def close(self) -> None:
        for run in self._runs.values():
            for follower in run.followers:
                follower.given_up.set()
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._engine.close()

    async def _connect(self) -> bool:
        if not self._settings.socket.exists():
            self._why = f"no engine listens at {self._settings.socket}"
            return False
        try:
            self.facts = await self._call(self._engine.connect)
        except RuntimeFailed as error:
            self._why = error.message
            return False
        log.info("containers are run by the engine at %s (version %s)", self._settings.socket, self.facts.version)
        return True

    async def _listen(self) -> None:
        """Hear of ends until the engine goes away."""
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def tell(allocation: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(heard.put_nowait, allocation)

        def listen() -> None:
            try:
                for allocation in self._engine.ends(lambda: tell("")):
                    tell(allocation)
            except RuntimeFailed as error:
                log.debug("%s", error.message)
            finally:
                tell(None)

        threading.Thread(target=listen, name="docker events", daemon=True).start()
        while (allocation := await heard.get()) is not None:
            if allocation:
                self._job(self._look(self._runs.get(allocation)))
            else:
                # From here on nothing is missed: what has ended before is seen by looking, what nobody wants is removed.
                for run in list(self._runs.values()):
                    self._job(self._look(run, missed=True))
                self._job(self._sweep({run.record.allocation for run in self._runs.values()}))

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._calls, function, *arguments)

    def _job(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    # ---- starting

    def record(self, lease: Lease, now_ms: int) -> Record:
        scratch = str(self._place.scratch_root / lease.allocation)
        return record_of(lease, scratch, f"{self._mark}-{lease.allocation}", self._place.boot_id, now_ms, self.name)

    async def start(self, lease: Lease, workload: Workload, lease_state: LeaseState) -> None:
        record = workload.record
        if self.facts is None:
            raise EngineAway(f"the container engine is away: {self._why or 'it has just gone'}", again=1)
        run = self._runs[record.allocation] = Run(record, record.group)
        try:
            body = await self._prepare(lease, workload, run)
            await self._run(run, body, lease_state)
        except RuntimeFailed:
            await self._call(self._engine.remove, run.name)
            raise
        finally:
            workload.preparing = False
            if not run.began:
                del self._runs[record.allocation]
                self._spawner.unguard(record.allocation)
        workload.pid, workload.start_ticks = run.pid, run.start_ticks

    async def _prepare(self, lease: Lease, workload: Workload, run: Run) -> dict[str, Any]:
        record, identity = workload.record, self.identity
        assert lease.image is not None, "a task without one is a process"
        refuse_image(lease.image, self._settings.images)
        env = container_environment(lease, self._place.host, record.scratch, os.environ, identity)
        try:
            uid, gid = (identity.uid, identity.gid) if identity is not None else (os.geteuid(), os.getegid())
            self._scratch.make(record, uid, gid)
            self.records.begin(record)
        except OSError as error:
            raise RuntimeFailed(f"could not prepare its place: {error.strerror}: {error.filename}", again=1) from None
        binds = binds_of(lease, record.scratch, self._place.mount_roots, identity)
        image = await self._images.get(lease.image, workload, run.given_up)
        return creation(
            lease,
            image,
            self.facts or EngineFacts(),
            env=env,
            binds=binds,
            scratch=record.scratch,
            labels=self._labels(lease),
            network=self._settings.network,
            identity=identity,
        )

    def _labels(self, lease: Lease) -> dict[str, str]:
        return {
            "crater.agent": self._mark,
            "crater.node": self._place.host.node,
            "crater.cluster": self._place.cluster,
            "crater.allocation": lease.allocation,
            "crater.task": lease.task,
            "crater.token": str(lease.token),
            "crater.project": lease.project,
        }

    async def _run(self, run: Run, body: Mapping[str, Any], lease_state: LeaseState) -> None:
        record = run.record
        if run.given_up.is_set():
            raise RuntimeFailed("it was told to end before it had begun")
        await self._call(self._engine.create, run.name, body)
        # Before it runs: an agent that dies now must not leave it without anybody who ends it in time.
        self._guard(run, lease_state.fence_grace_ms(record.grace_ms))
        await self._call(self._engine.start, run.name)
        run.began = True
        found = await self._call(self._engine.inspect, run.name)
        self._take(run, found)
        self._guard(run, lease_state.fence_grace_ms(record.grace_ms))
        started = {"pid": run.pid, "start_ticks": run.start_ticks}
        write_record(str(self.records.directory(record.allocation)), "started.json", started, durably=False)
        await self._look(run, found)

    def _take(self, run: Run, found: Container | None) -> None:
        """What is known of a container once it runs."""
        run.began = True
        if found is not None and found.running:
            run.pid, run.start_ticks = found.pid, start_ticks(found.pid) or 0
            run.upper_dir, run.group = found.upper_dir, cgroup.group_of(found.pid, found.id)
        if found is not None and not run.followers:
            run.followers = [self._follower(run, stream) for stream in ("stdout", "stderr")]
            for follower in run.followers:
                follower.start()

    def _follower(self, run: Run, stream: str) -> Follower:
        return Follower(
            run.name,
            lambda since_s: self._engine.output(run.name, stream, since_s),
            self.records.log_file(run.record.allocation, stream),
            self.records.directory(run.record.allocation) / f"{stream}.position",
            lambda: not run.ending,
        )

    def _guard(self, run: Run, fence_grace_ms: int) -> None:
        if run.record.restartable:
            guard = {
                "dir": str(self.records.directory(run.record.allocation)),
                "socket": str(self._settings.socket),
                "container": run.name,
                "pid": run.pid,
                "start_ticks": run.start_ticks,
                "fence_grace_ms": fence_grace_ms,
            }
            self._spawner.guard(run.record.allocation, guard)

    # ---- ending

    def terminate(self, workload: Workload) -> None:
        self._signal(workload, signal.SIGTERM)

    def kill(self, workload: Workload) -> None:
        self._signal(workload, signal.SIGKILL)

    def _signal(self, workload: Workload, number: signal.Signals) -> None:
        run = self._runs.get(workload.allocation)
        if run is not None and not run.ended:
            run.asked = True
            run.given_up.set()
            if run.began and number not in run.signals:
                run.signals.add(number)
                self._job(self._signal_one(run, number))

    async def _signal_one(self, run: Run, number: signal.Signals) -> None:
        try:
            await self._call(self._engine.signal, run.name, number)
        except EngineAway:
            if run.pid and proctree.is_alive(run.pid, run.start_ticks):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(run.pid, number)
        finally:
            run.signals.discard(number)

    async def _look(self, run: Run | None, found: Container | None = None, *, missed: bool = False) -> None:
        """See whether it has ended; `missed`: nobody has listened for a while."""
        if run is None or not run.began or run.ending:
            return
        found = found or await self._call(self._engine.inspect, run.name)
        if found is not None and found.running:
            self._take(run, found)
            return
        if run.ending:
            return
        run.ending = True
        self._take(run, found)
        await self._end(run, await self._raw(run, found, missed))

    def _look_without_engine(self) -> None:
        for run in self._runs.values():
            if run.began and not run.ending and not (run.pid and proctree.is_alive(run.pid, run.start_ticks)):
                run.ending = True
                self._job(self._end(run, {"known": False, "engine_lost": True}, OUTPUT_PATIENCE_S / 10))

    async def _raw(self, run: Run, found: Container | None, missed: bool) -> dict[str, Any]:
        """How it ended, as `exit.json` keeps it."""
        fenced = (self.records.directory(run.record.allocation) / "fenced.json").exists()
        if found is None:
            return {"known": False, "fenced": fenced}
        code = found.exit_code if found.exit_code is not None else -1
        by_engine = code in BY_THE_ENGINE and not (run.asked or found.oom_killed or fenced)
        lost = by_engine and (missed or not await self._call(self._engine.reachable))
        signalled = 128 < code <= 128 + signal.SIGRTMAX
        return {
            "code": None if signalled else code,
            "signal": code - 128 if signalled else None,
            "fenced": fenced,
            "oom_kills": int(found.oom_killed),
            "engine_lost": lost,
        }

    async def _end(self, run: Run, raw: dict[str, Any], patience_s: float = OUTPUT_PATIENCE_S) -> None:
        counters = run.counters or Counters()
        peak_bytes = counters.memory_max_bytes
        if raw.get("oom_kills"):
            # The kernel kills at the limit, mostly between two looks.
            peak_bytes = max(peak_bytes, run.record.memory_bytes)
        raw |= {"cpu_ms": counters.cpu_ms, "memory_peak_bytes": peak_bytes, "at_ms": time.time_ns() // 1_000_000}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await asyncio.gather(*(follower.finished.wait() for follower in run.followers))
        for follower in run.followers:
            if not follower.finished.is_set():
                follower.given_up.set()
                log.warning("the last output of %s may be missing", run.record.allocation)
        self._spawner.unguard(run.record.allocation)
        with contextlib.suppress(OSError):
            write_record(str(self.records.directory(run.record.allocation)), "exit.json", raw)
        run.ended = True
        self._on_exit(run.record.allocation, raw)

    # ---- looking

    def lives(self, workload: Workload) -> bool:
        run = self._runs.get(workload.allocation)
        return run is not None and not run.ended

    def counters(self, workload: Workload) -> Counters | None:
        run = self._runs.get(workload.allocation)
        if run is None or run.ending or run.group is None:
            return None
        counters = run.group.counters()
        if counters.cpu_ms:
            run.counters = counters
        return run.counters

    def pids(self, workload: Workload) -> set[int]:
        run = self._runs.get(workload.allocation)
        if run is None or run.ended:
            return set()
        return run.group.pids() if run.group is not None else {run.pid} - {0}

    def lost_devices(self, workload: Workload) -> bool:
        run = self._runs.get(workload.allocation)
        if run is None or run.ending or not run.pid:
            return False
        return device_probe.may_open(cgroup.device_procs_files(run.pid)) is False

    def disk_paths(self, workload: Workload) -> tuple[str, ...]:
        run = self._runs.get(workload.allocation)
        layer = (run.upper_dir,) if run is not None and run.upper_dir and os.access(run.upper_dir, os.R_OK) else ()
        return (workload.record.scratch, *layer)

    # ---- after the end

    async def clean(self, record: Record) -> bool:
        self._spawner.unguard(record.allocation)
        gone = True
        for delay_s in (0.0, 0.2, 1.0):
            await asyncio.sleep(delay_s)
            if gone := await self._call(self._engine.remove, record.group):
                break
        self._runs.pop(record.allocation, None)
        if record.scratch:
            await asyncio.to_thread(self._scratch.remove, Path(record.scratch))
        return gone

    async def adopt(self, kept: Sequence[Kept], silent_ms: int) -> list[Workload]:
        found = {one.allocation: one for one in await self._ours()} if kept else {}
        return [w for one in kept if (w := self._adopt_one(one, found.get(one.record.allocation), silent_ms)) is not None]

    async def _ours(self) -> list[Container]:
        try:
            return await self._call(self._engine.ours) if self.facts is not None else []
        except RuntimeFailed as error:
            log.warning("this agent's containers are not known now: %s", error.message)
            self.facts = None
            return []

    def _adopt_one(self, kept: Kept, found: Container | None, silent_ms: int) -> Workload | None:
        record = kept.record
        workload = Workload(record, Phase.RUNNING, silent_ms=silent_ms)
        if kept.final is not None:
            workload.conclude(kept.final)
            if found is not None:
                self._job(self.clean(record))
            return workload
        began = kept.pid is not None or kept.exit is not None or (found is not None and found.started)
        if not began:
            # Made perhaps, but never started: the lease, if it is still wanted, is taken anew.
            self.records.forget(record.allocation)
            return None
        run = self._runs[record.allocation] = Run(record, record.group, began=True)
        workload.pid, workload.start_ticks = run.pid, run.start_ticks = kept.pid or 0, kept.start_ticks
        if kept.exit is not None:
            run.ending = run.ended = True
            workload.exit = exit_of(kept.exit)
        elif record.boot_id != self._place.boot_id and not (found is not None and found.running):
            run.ending = run.ended = True
            workload.exit = Exit(known=False)
            reason = Reason.of(ReasonCode.NODE_LOST, node=self._place.host.node, silent_ms=silent_ms)
            workload.stop = (AllocationStatus.LOST, reason)
        else:
            # Whether it runs is looked at as soon as the engine is listened to; until then it counts as running.
            self._take(run, found)
            self._guard(run, LeaseState(silent_ms).fence_grace_ms(record.grace_ms))
            workload.pid, workload.start_ticks = run.pid, run.start_ticks
        workload.ready = workload.exit is None and self.records.is_ready(record.allocation)
        workload.pending = [workload.progress()] if workload.exit is None else []
        return workload

    async def remove_strays(self, records: Iterable[Record]) -> list[str]:
        return await self._sweep({record.allocation for record in records})

    async def _sweep(self, known: set[str]) -> list[str]:
        strays = [one for one in await self._ours() if one.allocation not in known | set(self._runs)]
        for one in strays:
            await self._call(self._engine.remove, one.id)
        return sorted(one.allocation for one in strays)


async def _logged(work: Coroutine[Any, Any, object]) -> None:
    """What fails because the engine is away is looked at again when it is back."""
    try:
        await work
    except RuntimeFailed as error:
        log.debug("%s", error.message)
