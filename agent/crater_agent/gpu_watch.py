"""Watches the node's real GPUs: what each task uses of them, and whether each may be given out. The thin edge around the pure
modules `gpu_tenants`, `gpu_faults`, `gpu_quarantine` and `gpu_idle`; all of it runs in the agent's loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping

from crater_agent.config import GpuHealth
from crater_agent.gpu_device import RELEASE_S, Device
from crater_agent.gpu_faults import UNWELCOME, Fault, Whose, of_reading, of_xid, throttling, whose, xid_text
from crater_agent.gpu_kept import KeptFaults
from crater_agent.gpu_quarantine import AT_ONCE, Quarantine, looked_at, struck
from crater_agent.gpu_reader import CardReader, News
from crater_agent.gpu_reading import Glance, Reading, XidEvent
from crater_agent.gpu_strangers import lives, who_is
from crater_agent.gpu_tenants import faults_of_tenancy, tenancy
from crater_agent.gpu_use import count_use, measure
from crater_agent.mps_control import is_mps
from crater_agent.mps_daemons import MpsDaemons
from crater_agent.nvml import Gpu, Nvml
from crater_agent.reconcile import Phase
from crater_agent.records import Record, Records
from crater_agent.runtimes import Runtimes
from crater_agent.workload import Workload
from crater_core.clock import Clock
from crater_core.errors import RuntimeFailed
from crater_core.model.reason import Reason, ReasonCode
from crater_core.wire.agents import Lease

log = logging.getLogger("crater.agent.gpu")
STRANGER_MS = 1_500
"""A process that is on a device for less is one that is just being taken away, or one that only looks."""
TICK_S = 1.0
INSIDE_MS = 15_000


class GpuWatch:
    """`on_change` is called when a decision about a workload may have changed, `on_trouble` with what a task is to be warned
    of, `on_health` with why each device is in quarantine, by UUID, when that has changed."""

    def __init__(
        self,
        door: Nvml,
        gpus: Iterable[Gpu],
        interval_ms: int,
        settings: GpuHealth,
        node: str,
        workloads: Mapping[str, Workload],
        runtimes: Runtimes,
        records: Records,
        clock: Clock,
        kept: KeptFaults,
        mps: MpsDaemons | None = None,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_trouble: Callable[[Workload, Reason], None] = lambda workload, reason: None
        self.on_health: Callable[[Mapping[str, str]], None] = lambda unwell: None
        self._door, self._settings, self._node = door, settings, node
        self._workloads, self._runtimes, self._records, self._clock = workloads, runtimes, records, clock
        self.mps = mps
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._looked = asyncio.Condition()
        self._reopened_ms = 0
        self._looked_inside_ms = 0
        self._began_ms = clock.monotonic_ms()
        self._looking_inside: asyncio.Task[None] | None = None
        self.devices: dict[str, Device] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        by_card: dict[str, list[Gpu]] = {}
        for gpu in gpus:
            by_card.setdefault(gpu.card, []).append(gpu)
        self._readers: list[CardReader] = []
        for of_card in by_card.values():
            reader = CardReader(door, tuple(of_card), interval_ms / 1000, self._tell)
            self._readers.append(reader)
            self.devices |= {gpu.uuid: Device(gpu, reader, unsettled_ms=self._began_ms) for gpu in of_card}
        self._kept = kept
        for uuid, quarantine in kept.load().items():
            if uuid in self.devices:
                self.devices[uuid].quarantine = quarantine

    # ---- life

    async def attend(self) -> None:
        """Until cancelled."""
        self._loop = asyncio.get_running_loop()
        for reader in self._readers:
            reader.start()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        self._take(await self._news.get())
                        while not self._news.empty():
                            self._take(self._news.get_nowait())
                        async with self._looked:
                            self._looked.notify_all()
                self._tick()
                self._tell_health()
        finally:
            for reader in self._readers:
                reader.stop()
            if self._looking_inside is not None:
                self._looking_inside.cancel()

    def _tell(self, news: News) -> None:
        """Called by the readers' threads."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._news.put_nowait, news)

    def _tick(self) -> None:
        now_ms = self._clock.monotonic_ms()
        busy = {grant.uuid for workload in self._running() for grant in workload.record.gpus}
        for reader in self._readers:
            reader.watched = any(d.gpu.uuid in busy or d.unsettled_ms is not None for d in self._of_card(reader.card))
        if now_ms - self._looked_inside_ms >= INSIDE_MS and (self._looking_inside is None or self._looking_inside.done()):
            self._looked_inside_ms = now_ms
            self._looking_inside = asyncio.create_task(self._look_inside())
        for device in self.devices.values():
            silent_s = device.reader.silent_s
            if silent_s * 1000 > self._settings.answer_within:
                device.reading = device.glance = None
                fault = Fault("silent", f"NVML has not answered for {int(self._settings.answer_within / 1000)} s")
                device.quarantine = looked_at(device.quarantine, (fault,), now_ms, self._settings.well_for)
            elif device.quarantine.faults and now_ms - device.looked_ms >= self._settings.recheck:
                self._look_again(device, now_ms)

    async def _look_inside(self) -> None:
        """Whether containers have lost their devices, as happens when somebody else writes to their cgroups."""
        for workload in self._running():
            if not workload.record.gpus or workload.gpu_fault is not None:
                continue
            if await asyncio.to_thread(self._runtimes.of(workload.record).lost_devices, workload) and workload.running:
                why = "its container can no longer open it, as after a reload of the host's systemd"
                device = str(workload.record.gpus[0].index)
                workload.gpu_fault = Reason.of(ReasonCode.GPU_FAULT, device=device, node=self._node, why=why)
                log.error("%s: %s", workload.allocation, why)
                self.on_trouble(workload, Reason.of(ReasonCode.GPU_DEVICES_LOST))

    def _look_again(self, device: Device, now_ms: int) -> None:
        lost = any(fault.code == "lost" for fault in device.quarantine.faults)
        hangs = any(reader.silent_s > TICK_S for reader in self._readers)
        if lost and not hangs and now_ms - self._reopened_ms >= self._settings.recheck:
            # A card that is back is seen only by those who open the library anew. One call that hangs would hold up all others.
            self._reopened_ms = now_ms
            threading.Thread(target=self._door.reopen, name="gpu reopen", daemon=True).start()
        device.reader.hurry()

    def _tell_health(self) -> None:
        self._kept.save({uuid: device.quarantine for uuid, device in self.devices.items()})
        unwell = {uuid: device.quarantine.why for uuid, device in self.devices.items()}
        if all(device.reported == unwell[uuid] for uuid, device in self.devices.items()):
            return
        for uuid, device in self.devices.items():
            if unwell[uuid] != device.reported:
                if unwell[uuid]:
                    log.error("GPU %d (%s) is in quarantine: %s", device.gpu.index, uuid, unwell[uuid])
                else:
                    log.warning("GPU %d (%s) is given out again", device.gpu.index, uuid)
                device.reported = unwell[uuid]
        self.on_health({uuid: why for uuid, why in unwell.items() if why})

    # ---- what the agent asks

    async def ready_for(self, lease: Lease) -> None:
        """Raises RuntimeFailed where a device of the lease may not be used now; waits a while for what an ended task leaves."""
        for grant in lease.devices:
            device = self.devices.get(grant.uuid)
            if device is None:
                continue
            if device.unsettled_ms is not None:
                device.reader.hurry()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELEASE_S), self._looked:
                        await self._looked.wait_for(lambda device=device: device.unsettled_ms is None or device.quarantine.faults)
            why = device.quarantine.why
            if not why and device.unsettled_ms is not None:
                why = "it could not be read yet" if device.glance is None else "what an ended task held has not been given back"
            if why:
                raise RuntimeFailed(f"GPU {device.gpu.index} cannot be used: {why}", again=1)

    def released(self, record: Record) -> None:
        """What it held may still be there until it was looked at."""
        for grant in record.gpus:
            device = self.devices.get(grant.uuid)
            if device is not None:
                device.unsettled_ms = self._clock.monotonic_ms()
                device.reader.hurry()

    # ---- what the readers tell

    def _take(self, news: News) -> None:
        try:
            if isinstance(news, XidEvent):
                self._hear(news)
            else:
                self._look(news)
        except Exception:
            # What one card tells must not end the care for the tasks of all others.
            log.exception("what was told of a GPU could not be taken in: %s", news)

    def _look(self, news: Reading | Glance) -> None:
        glance = news.glance if isinstance(news, Reading) else news
        device = self.devices[glance.uuid]
        now_ms = self._clock.monotonic_ms()
        if isinstance(news, Glance) and news.error and device.glance is not None and not device.glance.error:
            device.reader.hurry()
        device.glance, device.looked_ms = glance, now_ms
        tenants = self._tenants(device)
        owners = self._owners(device)
        alone = self._alone(device, tenants)
        gone = {holder.pid for holder in glance.holders or () if holder.pid not in owners and not lives(holder.pid)}
        waiting = self._look_for_strangers(device, glance, owners, now_ms)
        known = {pid: who_is(pid) for pid, since_ms in device.strangers.items() if now_ms - since_ms >= STRANGER_MS}
        device.tenancy = tenancy(glance, owners, alone, known, gone)
        if self.mps is not None:
            there = {
                holder.pid: owners[holder.pid] for holder in glance.holders or () if holder.pid in owners and holder.computes
            }
            self.mps.computing(glance.uuid, there)
        occupied = bool(tenants)
        device.settle(waiting or bool(gone), occupied, now_ms)
        if not glance.error and measure(device, tenants, self._records):
            self.on_change()
        if isinstance(news, Reading):
            self._take_whole(device, news, tenants, owners, alone, now_ms)
        elif device.unsettled_ms is None or occupied:
            self._judge(device, of_reading(device.reading, self._settings.ignore) if device.reading else (), occupied, now_ms)

    def _take_whole(
        self, device: Device, reading: Reading, tenants: list[Workload], owners: Mapping[int, str], alone: str | None, now_ms: int
    ) -> None:
        device.reading = reading
        throttled = throttling(reading.throttle_mask) & UNWELCOME
        if throttled - device.throttled:
            log.warning("GPU %d (%s) is slowed down: %s", device.gpu.index, device.gpu.uuid, ", ".join(sorted(throttled)))
        device.throttled = throttled
        if not reading.glance.error:
            count_use(device, reading, tenants, owners, alone, self._records, now_ms, self._began_ms)
        self._judge(device, of_reading(reading, self._settings.ignore), bool(tenants), now_ms)

    def _judge(self, device: Device, faults: tuple[Fault, ...], occupied: bool, now_ms: int) -> None:
        before = device.quarantine
        if device.glance is not None and device.unsettled_ms is None:
            faults += faults_of_tenancy(device.glance, device.tenancy, occupied, self._settings.ignore)
        else:
            # Until it is clear who is there, whoever was there still is.
            faults += tuple(fault for fault in before.faults if fault.code in AT_ONCE)
        if self.mps is not None and (why := self.mps.why_out(device.gpu.uuid)):
            faults += (Fault("mps", why),)
        device.quarantine = looked_at(before, faults, now_ms, self._settings.well_for)
        self._befall(device, before)

    def _befall(self, device: Device, before: Quarantine) -> None:
        """What a new fault of a device means for the tasks on it."""
        fresh = [
            fault for fault in device.quarantine.faults if fault not in before.faults and (fault.stops or fault.code == "xid_94")
        ]
        for fault in fresh:
            for workload in self._tenants(device):
                if workload.gpu_fault is None:
                    workload.gpu_fault = Reason.of(
                        ReasonCode.GPU_FAULT, device=str(device.gpu.index), node=self._node, why=fault.text
                    )
                workload.gpu_fault_stops |= fault.stops and self._settings.running_work == "stop"
        if fresh:
            self.on_change()

    def _hear(self, event: XidEvent) -> None:
        for device in self._of_card(event.uuid):
            device.xids += 1
            log.warning("GPU %d (%s): %s", device.gpu.index, device.gpu.uuid, xid_text(event.number))
            fault = of_xid(event.number)
            if fault is not None and fault.code not in self._settings.ignore:
                before = device.quarantine
                device.quarantine = struck(before, fault, self._clock.monotonic_ms())
                self._befall(device, before)
                device.reader.hurry()
            if whose(event.number) is Whose.PROGRAM:
                reason = Reason.of(ReasonCode.GPU_XID, device=str(device.gpu.index), what=xid_text(event.number))
                for workload in self._tenants(device):
                    self.on_trouble(workload, reason)

    # ---- whose it is

    def _running(self) -> list[Workload]:
        return [workload for workload in self._workloads.values() if workload.running and workload.lives]

    def _tenants(self, device: Device) -> list[Workload]:
        return [workload for workload in self._running() if device.is_of(workload)]

    def _of_card(self, card: str) -> list[Device]:
        return [device for device in self.devices.values() if device.gpu.card == card]

    def _owners(self, device: Device) -> dict[int, str]:
        """What is being started may be there already, before it counts as running."""
        starting = [w for w in self._workloads.values() if w.phase is Phase.STARTING and device.is_of(w)]
        return {pid: w.allocation for w in (*starting, *self._tenants(device)) for pid in self._runtimes.of(w.record).pids(w)}

    @staticmethod
    def _alone(device: Device, tenants: list[Workload]) -> str | None:
        """The one that has all of it: who else is there is not one of ours."""
        if len(tenants) != 1:
            return None
        return tenants[0].allocation if device.grant_of(tenants[0]).compute_milli >= 1000 else None

    def _look_for_strangers(self, device: Device, glance: Glance, owners: Mapping[int, str], now_ms: int) -> bool:
        """Whether there are some that were not there for long yet."""
        there = {
            holder.pid
            for holder in glance.holders or ()
            if holder.computes
            and holder.pid not in owners
            and lives(holder.pid)
            and not is_mps(holder.pid)
            and (self.mps is None or holder.pid not in self.mps.probes)
        }
        device.strangers = {pid: device.strangers.get(pid, now_ms) for pid in there}
        return any(now_ms - since_ms < STRANGER_MS for since_ms in device.strangers.values())
