"""Runs tasks that have an image as containers of this machine's engine, and finds them again after a restart of either side."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from crater_agent import cgroup, device_probe
from crater_agent.cgroup import Counters
from crater_agent.config import Docker
from crater_agent.cores import Cores
from crater_agent.docker_adopt import take_over
from crater_agent.docker_calls import Calls
from crater_agent.docker_cores import ContainerCores
from crater_agent.docker_engine import Container, Engine
from crater_agent.docker_errors import EngineAway
from crater_agent.docker_images import Images
from crater_agent.docker_life import Life, Run
from crater_agent.docker_mounts import binds_of
from crater_agent.docker_presence import Presence
from crater_agent.docker_spec import EngineFacts, container_environment, creation, labels_of, mps_binds, mps_user, refuse_image
from crater_agent.forked import write_record
from crater_agent.reconcile import LeaseState
from crater_agent.records import Kept, Record, Records, record_of
from crater_agent.runtime import Identity, Place, near_gpus
from crater_agent.scratch import Scratch
from crater_agent.spawner import Spawner
from crater_agent.workload import Workload
from crater_core.errors import RuntimeFailed
from crater_core.model.reason import Reason
from crater_core.wire.agents import Lease

log = logging.getLogger("crater.agent.docker")


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
        cores: Cores | None = None,
    ) -> None:
        self.records = records
        self._place, self._spawner, self._settings, self._mark = place, spawner, settings, mark
        self._call = Calls()
        self._engine = Engine(str(settings.socket), mark)
        self._presence = Presence(self._engine, settings.socket, self._call, self)
        self._life = Life(self._engine, self._call, records, spawner, on_exit)
        self._scratch = Scratch(place.scratch_root)
        self._images = Images(self._engine, settings, place.host.node, self._call, on_progress)
        self._runs: dict[str, Run] = {}
        self._cores = ContainerCores(self._engine, self._call, cores, self._runs) if cores is not None else None
        if cores is not None and self._cores is not None:
            cores.sharers.append(self._cores.settle)
        self._on_offer = on_offer

    # ---- the engine

    @property
    def identity(self) -> Identity | None:
        """Only a root agent lets an image choose its user: another one could not clean up after it."""
        if self._place.identity is not None or os.geteuid() == 0:
            return self._place.identity
        return Identity(os.geteuid(), os.getegid(), (), "")

    async def open(self) -> EngineFacts | None:
        """A first look. None: no engine can be used now, `why_not` says why."""
        return await self._presence.open()

    @property
    def why_not(self) -> str:
        return self._presence.why_not

    async def attend(self) -> None:
        """Until cancelled: hears what ends, and finds the engine again when it was away."""
        await self._presence.attend()

    async def close(self) -> None:
        for run in self._runs.values():
            for follower in run.followers:
                follower.given_up.set()
        await self._call.close()
        self._engine.close()

    def on_offer(self, yes: bool) -> None:
        self._on_offer(yes)

    def on_listening(self) -> None:
        for run in list(self._runs.values()):
            self._call.job(self._life.look(run, missed=True))
            run.cores = None  # An engine that was away was not told, or has forgotten.
        self._call.job(self._sweep({run.record.allocation for run in self._runs.values()}))
        if self._cores is not None:
            self._call.job(self._cores.settle())

    def on_end(self, allocation: str) -> None:
        self._call.job(self._life.look(self._runs.get(allocation)))

    def on_given_up(self) -> None:
        for run in self._runs.values():
            self._life.look_without_engine(run)

    # ---- starting

    def record(self, lease: Lease, now_ms: int) -> Record:
        scratch = str(self._place.scratch_root / lease.allocation)
        record = record_of(lease, scratch, f"{self._mark}-{lease.allocation}", self._place.boot_id, now_ms, self.name)
        if self._cores is None:
            return record
        return replace(record, cores=self._cores.cores.take_for(lease, record.group, near_gpus(lease, self._place)))

    async def start(self, lease: Lease, workload: Workload, lease_state: LeaseState) -> None:
        record = workload.record
        if self._presence.facts is None:
            raise EngineAway(f"the container engine is away: {self.why_not or 'it has just gone'}", again=1)
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
        record, identity = workload.record, mps_user(lease, self.identity)
        assert lease.image is not None, "a task without one is a process"
        refuse_image(lease.image, self._settings.images)
        env = container_environment(lease, self._place.host, record.scratch, os.environ, identity)
        try:
            uid, gid = (identity.uid, identity.gid) if identity is not None else (os.geteuid(), os.getegid())
            self._scratch.make(record, uid, gid)
            self.records.begin(record)
        except OSError as error:
            raise RuntimeFailed(f"could not prepare its place: {error.strerror}: {error.filename}", again=1) from None
        binds = [*binds_of(lease, record.scratch, self._place.mount_roots, identity), *mps_binds(lease, env)]
        image = await self._images.get(lease.image, workload, run.given_up)
        run.cores = self._cores.of(run) if self._cores is not None else None
        return creation(
            lease,
            image,
            self._presence.facts or EngineFacts(),
            env=env,
            binds=binds,
            scratch=record.scratch,
            labels=labels_of(lease, self._mark, self._place.host.node, self._place.cluster),
            network=self._settings.network,
            identity=identity,
            cores=run.cores or (),
        )

    async def _run(self, run: Run, body: Mapping[str, Any], lease_state: LeaseState) -> None:
        record = run.record
        if run.given_up.is_set():
            raise RuntimeFailed("it was told to end before it had begun")
        await self._call(self._engine.create, run.name, body)
        run.made = True
        if self._cores is not None:
            # An owner's cores are left by all others before it runs; and what is shared may have changed since it was made.
            await (self._cores.cores.share_the_rest() if record.cores else self._cores.settle_one(run))
        # Before it runs: an agent that dies now must not leave it without anybody who ends it in time.
        self._life.guard(run, lease_state.fence_grace_ms(record.grace_ms))
        await self._call(self._engine.start, run.name)
        run.began = True
        found = await self._call(self._engine.inspect, run.name)
        self._life.take(run, found)
        self._life.guard(run, lease_state.fence_grace_ms(record.grace_ms))
        started = {"pid": run.pid, "start_ticks": run.start_ticks}
        write_record(str(self.records.directory(record.allocation)), "started.json", started, durably=False)
        await self._life.look(run, found)

    # ---- ending

    def terminate(self, workload: Workload) -> None:
        if (run := self._runs.get(workload.allocation)) is not None:
            self._life.signal(run, signal.SIGTERM)

    def kill(self, workload: Workload) -> None:
        if (run := self._runs.get(workload.allocation)) is not None:
            self._life.signal(run, signal.SIGKILL)

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
        if self._cores is not None and self._cores.cores.give_back(record.group):
            await self._cores.cores.share_the_rest()
        if record.scratch:
            await asyncio.to_thread(self._scratch.remove, Path(record.scratch))
        return gone

    async def adopt(self, kept: Sequence[Kept], silent_ms: int) -> list[Workload]:
        found = {one.allocation: one for one in await self._ours()} if kept else {}
        return [w for one in kept if (w := self._adopt_one(one, found.get(one.record.allocation), silent_ms)) is not None]

    async def _ours(self) -> list[Container]:
        try:
            return await self._call(self._engine.ours) if self._presence.facts is not None else []
        except RuntimeFailed as error:
            log.warning("this agent's containers are not known now: %s", error.message)
            self._presence.lost()
            return []

    def _adopt_one(self, kept: Kept, found: Container | None, silent_ms: int) -> Workload | None:
        record = kept.record
        taken = take_over(kept, found, self._place.boot_id, self._place.host.node, silent_ms)
        if taken is None:
            # Made perhaps, but never started: the lease, if it is still wanted, is taken anew.
            self.records.forget(record.allocation)
            return None
        workload, run = taken
        if run is None:
            if found is not None:
                self._call.job(self.clean(record))
            return workload
        self._runs[record.allocation] = run
        if not run.ended:
            self._life.take(run, found)
            self._life.guard(run, LeaseState(silent_ms).fence_grace_ms(record.grace_ms))
            workload.pid, workload.start_ticks = run.pid, run.start_ticks
            if record.cores and self._cores is not None:
                self._cores.cores.keep(record.group, record.cores)
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
