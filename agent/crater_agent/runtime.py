"""Runs workloads as processes: starts one in its cgroup and scratch directory, ends all of it, and removes what is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pwd
import secrets
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crater_agent import mounts, proctree, shim
from crater_agent.adopt import adopt
from crater_agent.cgroup import Cgroups, Counters, Limits
from crater_agent.cores import Cores
from crater_agent.device_files import EVERYBODYS, NVIDIA_MAJOR, DeviceFile
from crater_agent.environment import Host, arguments, environment, find_program, refuse_what_cannot_be_done
from crater_agent.reconcile import LeaseState
from crater_agent.records import Kept, Record, Records, record_of
from crater_agent.scratch import Scratch
from crater_agent.spawner import Spawner
from crater_agent.warm import template_for
from crater_agent.workload import Workload
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import Lease

log = logging.getLogger("crater.agent.runtime")
PARKED = 2
"""Children that wait in a cgroup for the next starts."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user that workloads run as; None in the agent: its own."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def identity_of(user: str) -> Identity:
    """Raises KeyError for a user that is not there."""
    entry = pwd.getpwnam(user)
    return Identity(entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(user, entry.pw_gid)), entry.pw_dir)


@dataclass(frozen=True, slots=True)
class Place:
    """What the runtime needs of this node."""

    host: Host
    scratch_root: Path
    boot_id: str
    mount_roots: tuple[Path, ...] = ()
    identity: Identity | None = None
    device_files: tuple[DeviceFile, ...] = EVERYBODYS
    gpu_files: Mapping[str, tuple[DeviceFile, ...]] = field(default_factory=lambda: {})
    """By UUID."""
    no_disk_limit: str = ""
    """Why scratch space is watched and not held; empty when it is held."""
    keep_failed_ms: int = 0
    disk_quota: bool = False
    """Sizes of scratch space are held by a project quota of the file system."""
    no_mounts: str = ""
    """Why a path cannot be shown at another one; empty when it can."""
    gpu_numa: Mapping[str, int] = field(default_factory=lambda: {})
    cluster: str = ""
    """The scheduler's address, by which containers say whose they are."""


def near_gpus(lease: Lease, place: Place) -> int | None:
    """The memory node of the first of its GPUs that has one."""
    return next((place.gpu_numa[grant.uuid] for grant in lease.devices if grant.uuid in place.gpu_numa), None)


class ProcessRuntime:
    name = "process"

    def __init__(
        self, place: Place, records: Records, spawner: Spawner, cgroups: Cgroups | None, cores: Cores | None = None
    ) -> None:
        self.place = place
        self.records = records
        self.spawner = spawner
        self.cgroups = cgroups
        self._cores = cores
        if cores is not None:
            cores.sharers.append(self._share_the_rest)
        self.scratch = Scratch(place.scratch_root, place.no_disk_limit, place.keep_failed_ms, place.disk_quota)
        self._trees = proctree.Trees()
        self._parked: deque[str] = deque()
        self._names = itertools.count()
        self._prefix = secrets.token_hex(3)

    def record(self, lease: Lease, now_ms: int) -> Record:
        scratch = str(self.scratch.path(lease.allocation))
        record = record_of(lease, scratch, self._group_name(lease), self.place.boot_id, now_ms)
        if self.scratch.is_held(lease.disk_bytes):
            record = replace(record, disk_held=True)
        return (
            record
            if self._cores is None
            else replace(record, cores=self._cores.take_for(lease, record.group, near_gpus(lease, self.place)))
        )

    async def _share_the_rest(self) -> None:
        if self._cores is not None and self.cgroups is not None:
            for name in self.cgroups.names():
                if not self._cores.owns(name):
                    with contextlib.suppress(OSError):
                        self.cgroups.group(name).keep_on(self._cores.shared)

    def _group_name(self, lease: Lease) -> str:
        """The one a parked child waits in, or a new one; empty without cgroups."""
        if self.cgroups is None:
            return ""
        # What starts as a fork of a template cannot be a parked child.
        use_parked = self._parked and lease.warm_preload is None
        return self._parked.popleft() if use_parked else f"{self._prefix}-{next(self._names)}"

    def park(self) -> None:
        """Have children wait in cgroups of their own, so that the next starts need not wait for the kernel."""
        while self.cgroups is not None and len(self._parked) < PARKED:
            group = f"{self._prefix}-{next(self._names)}"
            try:
                procs_files = self.cgroups.create(group, Limits(cores=self._shared_cores())).procs_files
            except OSError as error:
                log.warning("no cgroup could be made in advance: %s", error)
                return
            self.spawner.park(group, procs_files)
            self._parked.append(group)

    async def unpark(self) -> None:
        with contextlib.suppress(RuntimeFailed):
            await self.spawner.ask({"op": "unpark"})
        while self._parked and self.cgroups is not None:
            await self.clean(Record("", "", 0, group=self._parked.popleft()))

    async def start(self, lease: Lease, workload: Workload, lease_state: LeaseState) -> None:
        """Raises RuntimeFailed with the reason in words; nothing is left behind then."""
        record = workload.record
        refuse_what_cannot_be_done(lease)
        binds = mounts.binds_of(lease.mounts, self.place.mount_roots, self.place.no_mounts)
        env = environment(lease, self.place.host, record.scratch, os.environ, sees_all_gpus=self._sees_all_gpus(lease))
        try:
            scratch = await self._make_scratch(record)
            working_dir = lease.working_dir or scratch
            program = find_program(lease.command[0], env["PATH"], working_dir, binds)
            self.records.begin(record)
            procs_files = self._make_group(lease, record)
            if record.cores and self._cores is not None:
                await self._cores.share_the_rest()
        except OSError as error:
            raise RuntimeFailed(f"could not prepare its place: {error.strerror}: {error.filename}", again=1) from None
        order: dict[str, Any] = {
            "op": "spawn",
            "id": record.allocation,
            "dir": str(self.records.directory(record.allocation)),
            "program": program,
            "argv": arguments(lease),
            "env": env,
            "cwd": working_dir,
            "stdout": str(self.records.log_file(record.allocation, "stdout")),
            "stderr": str(self.records.log_file(record.allocation, "stderr")),
            "group": record.group,
            "procs_files": procs_files,
            "restartable": record.restartable,
            "fence_grace_ms": lease_state.fence_grace_ms(record.grace_ms),
        }
        if self.place.identity is not None:
            who = self.place.identity
            order |= {"uid": who.uid, "gid": who.gid, "groups": list(who.groups)}
        if binds:
            if self.spawner.protocol < shim.PROTOCOL:
                why = "its spawner is older than the agent and cannot mount; a new one starts when the last task here has ended"
                raise RuntimeFailed(why, again=1)
            staging = self.records.directory(record.allocation) / "root"
            order["inside"] = mounts.order_of(binds, staging, self.place.scratch_root, record.scratch)
        # A template has given up the right to mount.
        template = template_for(lease, self.place.host, program, os.environ) if not binds else None
        if template is not None:
            order["template"] = template | {name: order[name] for name in ("uid", "gid", "groups") if name in order}
        try:
            answer = await self.spawner.ask(order)
        except RuntimeFailed:
            await self._undo(workload)
            raise
        if "error" in answer:
            raise RuntimeFailed(answer["error"], again=int(answer.get("again", 0)))
        workload.pid, workload.start_ticks = int(answer["pid"]), int(answer["start_ticks"] or 0)

    async def _undo(self, workload: Workload) -> None:
        """End what the spawner may have started before it went silent: an answer that is lost must not become a second copy."""
        started = self.records.read_start(workload.allocation)
        if started is None:
            return
        workload.pid, workload.start_ticks = started
        while self.lives(workload):
            self.kill(workload)
            await asyncio.sleep(0.01)

    async def _make_scratch(self, record: Record) -> str:
        who = self.place.identity
        uid, gid = (who.uid, who.gid) if who is not None else (os.geteuid(), os.getegid())
        if record.disk_held:
            await asyncio.to_thread(self.scratch.make, record, uid, gid)
        else:
            self.scratch.make(record, uid, gid)
        return record.scratch

    def _sees_all_gpus(self, lease: Lease) -> bool:
        granted = [file for grant in lease.devices for file in self.place.gpu_files.get(grant.uuid, ())]
        every_card = DeviceFile("c", NVIDIA_MAJOR)
        return self.cgroups is None or bool(self.cgroups.no_devices) or every_card in granted

    def _make_group(self, lease: Lease, record: Record) -> list[str]:
        if self.cgroups is None:
            return []
        granted = [file for grant in lease.devices for file in self.place.gpu_files.get(grant.uuid, ())]
        devices = tuple(dict.fromkeys((*self.place.device_files, *granted)))
        cores = record.cores or self._shared_cores()
        limits = Limits(lease.cpu_milli, not lease.control, lease.memory_bytes, devices=devices, cores=cores)
        return list(self.cgroups.create(record.group, limits).procs_files)

    def _shared_cores(self) -> tuple[int, ...]:
        return self._cores.shared if self._cores is not None else ()

    def terminate(self, workload: Workload) -> None:
        """SIGTERM to the first process's group, when that is still the process we started."""
        if proctree.is_alive(workload.pid, workload.start_ticks):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(workload.pid, signal.SIGTERM)

    def kill(self, workload: Workload) -> None:
        if self._grouped(workload):
            assert self.cgroups is not None
            self.cgroups.group(workload.record.group).kill()
        else:
            proctree.send(self.processes([workload])[workload.allocation], signal.SIGKILL)

    def lives(self, workload: Workload) -> bool:
        if self._grouped(workload):
            assert self.cgroups is not None
            return bool(self.cgroups.group(workload.record.group).pids())
        return bool(self.processes([workload])[workload.allocation])

    def main_lives(self, workload: Workload) -> bool:
        return proctree.is_alive(workload.pid, workload.start_ticks)

    def processes(self, workloads: Iterable[Workload]) -> dict[str, list[proctree.Process]]:
        """The living processes of workloads that no cgroup holds, by allocation."""
        of = {w.record.scratch: w for w in workloads}
        found = self._trees.find({marker: (w.pid, w.start_ticks) for marker, w in of.items()})
        return {of[marker].allocation: members for marker, members in found.items()}

    def counters(self, workload: Workload) -> Counters | None:
        if not self._grouped(workload):
            return None
        assert self.cgroups is not None
        return self.cgroups.group(workload.record.group).counters()

    def pids(self, workload: Workload) -> set[int]:
        if self._grouped(workload):
            assert self.cgroups is not None
            return self.cgroups.group(workload.record.group).pids()
        # As last measured: to look through all of /proc for each question would cost more than the answer is worth.
        return self._trees.known(workload.record.scratch)

    def lost_devices(self, workload: Workload) -> bool:
        return False  # Its cgroup is the agent's own: nobody else writes to it.

    def _grouped(self, workload: Workload) -> bool:
        return bool(workload.record.group) and self.cgroups is not None

    def disk_paths(self, workload: Workload) -> tuple[str, ...]:
        return (workload.record.scratch,)

    async def adopt(self, kept: Sequence[Kept], silent_ms: int) -> list[Workload]:
        """Call after the spawner has answered: then an exit of what it does not name is on disk."""
        found = adopt(self.records, kept, self.spawner.children, self.place.boot_id, self.place.host.node, silent_ms)
        for record in (workload.record for workload in found if workload.running):
            if record.cores and self._cores is not None:
                self._cores.keep(record.group, record.cores)
        return found

    async def clean(self, record: Record) -> bool:
        """Remove its cgroup and scratch directory; False when the kernel still held the cgroup after some tries."""
        gone = True
        if record.group and self.cgroups is not None:
            group = self.cgroups.group(record.group)
            for delay_s in (0.0, 0.001, 0.005, 0.02, 0.1, 0.5):
                await asyncio.sleep(delay_s)
                if gone := group.remove():
                    break
            if self._cores is not None and self._cores.give_back(record.group):
                await self._cores.share_the_rest()
        # An empty one goes at once: a thread for each would cost more than all the rest.
        if record.scratch and not self.scratch.remove_empty(record):
            await asyncio.to_thread(self.scratch.remove, Path(record.scratch))
        return gone

    async def remove_strays(self, records: Iterable[Record]) -> list[str]:
        """End and remove what carries our mark and belongs to no allocation we know; names what was found."""
        known = {record.allocation for record in records}
        groups = {record.group for record in records}
        strays: list[str] = []
        prefix = f"{self.place.scratch_root}/"
        for marker, process in self._trees.marked(prefix):
            if marker[len(prefix) :] not in known:
                strays.append(marker[len(prefix) :])
                proctree.send([process], signal.SIGKILL)
        for name in self.cgroups.names() if self.cgroups is not None else ():
            if name not in groups:
                assert self.cgroups is not None
                self.cgroups.group(name).kill()
                await self.clean(Record(name, "", 0, group=name))
        await asyncio.to_thread(self.scratch.remove_strays, known)
        return sorted(set(strays))
