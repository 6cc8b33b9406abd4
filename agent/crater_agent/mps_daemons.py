"""The MPS daemons of this node: one for each GPU of which a task has a share by MPS, from the first share to the last.

The state of each device is changed under its lock only; what is decided is in `mps`, and what is asked of a daemon in
`mps_control`. Daemons outlive the agent, as their clients do, and are found again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from crater_agent.mps import Limits, ceiling, limits_of, shares_by_mps, too_long, without_mps
from crater_agent.mps_control import Control, Owner, why_no_program
from crater_agent.nvml import Gpu
from crater_agent.records import Granted, Record
from crater_agent.workload import Workload
from crater_core.clock import Clock
from crater_core.errors import RuntimeFailed
from crater_core.model.reason import Reason, ReasonCode
from crater_core.wire.agents import Lease

log = logging.getLogger("crater.agent.mps")
LOOK_S = 1.0
WITHOUT_MS = 2_000
"""A process that has just come may be known to the driver before the daemon's list shows it."""
SILENT_MAX = 3
"""A daemon that lives may be late on a busy node; so often in a row is taken for its end."""
LEAVE_S = 5.0
"""How long clients may take to be let go, before their processes are killed all the same."""


@dataclass(slots=True)
class Daemon:
    """Of one device."""

    gpu: Gpu
    control: Control
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    tenants: dict[str, Limits] = field(default_factory=lambda: {})
    """By allocation."""
    up: bool = False
    servers: set[int] = field(default_factory=lambda: set())
    why: str = ""
    """Why no share of the device is given out."""
    tried_ms: int = 0
    silent: int = 0
    """How often in a row it has not answered."""
    computing: dict[int, str] = field(default_factory=lambda: {})
    """Processes of tenants that the driver sees on the device, with their allocations."""
    without_ms: dict[int, int] = field(default_factory=lambda: {})


class MpsDaemons:
    """`on_fault` is called with a reason that ends an allocation, `on_change` when something that was waited for has happened,
    or a device may be given out again."""

    def __init__(self, owner: Owner, gpus: Iterable[Gpu], node: str, recheck_ms: int, clock: Clock) -> None:
        self.on_fault: Callable[[str, Reason], None] = lambda allocation, reason: None
        self.on_change: Callable[[], None] = lambda: None
        self._node, self._recheck_ms, self._clock = node, recheck_ms, clock
        self._impossible = f"the path {owner.root} is too long for the MPS daemon's sockets" if too_long(owner.root) else ""
        self._by_uuid = {gpu.uuid: Daemon(gpu, Control(owner, gpu.index, gpu.uuid)) for gpu in gpus if not gpu.mig}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._jobs: set[asyncio.Task[None]] = set()

    def why_out(self, uuid: str) -> str:
        """Why the device may not be given out; empty when nothing is wrong."""
        daemon = self._by_uuid.get(uuid)
        return daemon.why if daemon is not None else ""

    def computing(self, uuid: str, by_pid: Mapping[int, str]) -> None:
        """What the driver sees on a device now."""
        daemon = self._by_uuid.get(uuid)
        if daemon is not None:
            daemon.computing = {pid: allocation for pid, allocation in by_pid.items() if allocation in daemon.tenants}

    @property
    def probes(self) -> set[int]:
        """Processes of this agent's own that may be on a device."""
        return {daemon.control.probing for daemon in self._by_uuid.values() if daemon.control.probing}

    # ---- life

    async def attend(self) -> None:
        """Until cancelled. The daemons of living tasks go on after it."""
        for daemon in self._by_uuid.values():
            if not daemon.tenants and daemon.control.there:
                log.info("ending the MPS daemon of GPU %d: no task has a share by it", daemon.gpu.index)
                await daemon.control.quit()
            if why := self._impossible or why_no_program():
                self._take_out(daemon, why)
        while True:
            for daemon in self._by_uuid.values():
                try:
                    await self._look_after(daemon)
                except Exception:
                    log.exception("the MPS daemon of GPU %d could not be looked after", daemon.gpu.index)
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Wait for what is under way."""
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)

    def adopt(self, workloads: Iterable[Workload]) -> None:
        """What an earlier agent started."""
        for workload in workloads:
            for grant in workload.record.gpus if workload.running else ():
                if grant.mps and grant.uuid in self._by_uuid:
                    daemon = self._by_uuid[grant.uuid]
                    daemon.tenants[workload.allocation] = limits_of(grant.compute_milli, grant.limit_mib)
                    daemon.up = True

    # ---- starts and ends

    async def ready_for(self, lease: Lease) -> None:
        """The daemon runs, has been probed, and allows the new share; raises RuntimeFailed where that cannot be had."""
        for grant in shares_by_mps(lease):
            daemon = self._by_uuid.get(grant.uuid)
            if daemon is None:
                raise RuntimeFailed(f"GPU {grant.index} is not shared by MPS on this node", again=1)
            async with daemon.lock:
                await self._admit(daemon, lease.allocation, limits_of(grant.compute_milli, grant.memory_mib))

    async def _admit(self, daemon: Daemon, allocation: str, limits: Limits) -> None:
        tenants = {**daemon.tenants, allocation: limits}
        try:
            if daemon.why:
                raise RuntimeFailed(daemon.why)
            await self._bring_up(daemon)
            await daemon.control.limit(ceiling(tenants.values()), daemon.gpu.memory_mib)
        except RuntimeFailed as error:
            if not daemon.why and not daemon.tenants:
                self._take_out(daemon, error.message)
                await self._take_down(daemon)
            raise RuntimeFailed(f"GPU {daemon.gpu.index} cannot be shared by MPS: {error.message}", again=1) from None
        daemon.tenants = tenants

    async def _bring_up(self, daemon: Daemon) -> None:
        if daemon.up:
            return
        if self._impossible:
            raise RuntimeFailed(self._impossible)
        await daemon.control.quit()  # What an earlier one may have left.
        await daemon.control.start()
        await daemon.control.probe()
        daemon.servers = set(await daemon.control.servers())
        daemon.up = True
        log.info("GPU %d is shared by MPS: its daemon runs, and a probe has passed", daemon.gpu.index)

    async def _take_down(self, daemon: Daemon) -> None:
        daemon.up, daemon.silent = False, 0
        await daemon.control.quit(daemon.servers)
        daemon.servers = set()

    def let_go(self, record: Record, pids: Iterable[int]) -> bool:
        """Whether its processes may be killed: a client that is killed in the middle of its work can take the others with it,
        so the daemon is told first. Call again until it may; `on_change` is called then."""
        daemons = self._of(record.gpus)
        if not daemons:
            return True
        job = self._leaving.get(record.allocation)
        if job is None:
            job = self._leaving[record.allocation] = self._job(self._terminate(daemons, frozenset(pids)))
        return job.done()

    async def _terminate(self, daemons: list[Daemon], pids: frozenset[int]) -> None:
        try:
            async with asyncio.timeout(LEAVE_S):
                for daemon in daemons:
                    clients = await daemon.control.clients(sorted(daemon.servers)) if daemon.up and not daemon.why else {}
                    for client, server in clients.items():
                        if client in pids:
                            await daemon.control.terminate_client(server, client)
        except (TimeoutError, RuntimeFailed) as error:
            log.warning("MPS clients could not be let go: %s", getattr(error, "message", "") or "no answer in time")
        finally:
            self.on_change()

    def released(self, record: Record) -> None:
        """It has ended, or never began."""
        self._leaving.pop(record.allocation, None)
        for daemon in self._of(record.gpus):
            if daemon.tenants.pop(record.allocation, None) is not None:
                self._job(self._fit_to_tenants(daemon))

    async def _fit_to_tenants(self, daemon: Daemon) -> None:
        """Without any the daemon ends; those that are left need no more than the largest of them has."""
        async with daemon.lock:
            if not daemon.tenants:
                await self._take_down(daemon)
            elif daemon.up and not daemon.why:
                try:
                    await daemon.control.limit(ceiling(daemon.tenants.values()), daemon.gpu.memory_mib)
                except RuntimeFailed as error:
                    log.warning("the MPS daemon of GPU %d allows more than it has to: %s", daemon.gpu.index, error.message)

    def _of(self, grants: Iterable[Granted]) -> list[Daemon]:
        return [self._by_uuid[grant.uuid] for grant in grants if grant.mps and grant.uuid in self._by_uuid]

    # ---- watching

    async def _look_after(self, daemon: Daemon) -> None:
        now_ms = self._clock.monotonic_ms()
        if daemon.why:
            if not daemon.tenants and now_ms - daemon.tried_ms >= self._recheck_ms:
                await self._try_again(daemon)
            return
        if not daemon.tenants:
            return
        async with daemon.lock:
            if not daemon.tenants or not daemon.up:
                return
            try:
                servers = set(await daemon.control.servers())
                clients = await daemon.control.clients(sorted(servers)) if daemon.computing else {}
            except RuntimeFailed as error:
                daemon.silent += 1
                if daemon.silent >= SILENT_MAX or not daemon.control.lives:
                    await self._crashed(daemon, error.message)
                return
            daemon.silent = 0
            if gone := daemon.servers - servers:
                await self._crashed(daemon, f"its MPS server (pid {min(gone)}) has ended")
                return
            daemon.servers = servers
        self._find_those_without(daemon, clients, now_ms)

    async def _crashed(self, daemon: Daemon, why: str) -> None:
        """What ran on it cannot go on; a daemon is started anew once nothing of it is left, and must pass a probe."""
        self._take_out(daemon, why)
        reason = Reason.of(ReasonCode.GPU_FAULT, device=str(daemon.gpu.index), node=self._node, why=why)
        for allocation in list(daemon.tenants):
            self.on_fault(allocation, reason)
        await self._take_down(daemon)

    def _take_out(self, daemon: Daemon, why: str) -> None:
        log.error("GPU %d takes no share by MPS: %s", daemon.gpu.index, why)
        daemon.why, daemon.tried_ms = f"MPS: {why}", self._clock.monotonic_ms()
        self.on_change()

    async def _try_again(self, daemon: Daemon) -> None:
        async with daemon.lock:
            daemon.tried_ms = self._clock.monotonic_ms()
            try:
                await self._bring_up(daemon)
            except RuntimeFailed as error:
                log.info("GPU %d still takes no share by MPS: %s", daemon.gpu.index, error.message)
                daemon.why = f"MPS: {error.message}"
            else:
                daemon.why = ""
                log.warning("GPU %d takes shares by MPS again: a probe has passed", daemon.gpu.index)
            await self._take_down(daemon)
        self.on_change()

    def _find_those_without(self, daemon: Daemon, clients: Mapping[int, int], now_ms: int) -> None:
        daemon.without_ms = without_mps(daemon.computing, clients, daemon.without_ms, now_ms)
        for pid, since_ms in daemon.without_ms.items():
            if now_ms - since_ms >= WITHOUT_MS:
                facts = {"device": str(daemon.gpu.index), "pid": pid}
                self.on_fault(daemon.computing[pid], Reason.of(ReasonCode.GPU_WITHOUT_MPS, **facts))

    def _job(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task
