"""What the watch over GPUs asks of runtimes: whether a container has lost its devices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from crater_agent.config import GpuHealth
from crater_agent.gpu_kept import KeptFaults
from crater_agent.gpu_watch import GpuWatch
from crater_agent.reconcile import Exit, Phase, outcome
from crater_agent.records import Granted, Record
from crater_agent.workload import Workload
from crater_core.clock import SystemClock
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import ReasonCode


def _workload(name: str, **record: Any) -> Workload:
    return Workload(Record(name, f"task-{name}", 1, runtime="docker", **record), Phase.RUNNING)


def test_a_container_that_lost_its_devices_is_told_of_and_its_failure_is_not_its_own(tmp_path: Path) -> None:
    async def story() -> None:
        lost, well, without = (
            _workload("lost", gpus=(Granted("GPU-a", 3),)),
            _workload("well", gpus=(Granted("GPU-b", 1),)),
            _workload("none"),
        )
        asked: list[str] = []
        told: asyncio.Queue[tuple[Workload, Any]] = asyncio.Queue()

        def lost_devices(workload: Workload) -> bool:
            asked.append(workload.allocation)
            return workload is lost

        runtimes: Any = SimpleNamespace(of=lambda _: SimpleNamespace(lost_devices=lost_devices))
        nothing: Any = None
        workloads = {w.allocation: w for w in (lost, well, without)}
        watch = GpuWatch(
            nothing, (), 5_000, GpuHealth(), "n1", workloads, runtimes, nothing, SystemClock(), KeptFaults(tmp_path, "boot")
        )
        watch.on_trouble = lambda workload, reason: told.put_nowait((workload, reason))
        attending = asyncio.create_task(watch.attend())
        try:
            async with asyncio.timeout(10):
                workload, reason = await told.get()
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
        assert (workload.allocation, reason.code) == ("lost", ReasonCode.GPU_DEVICES_LOST)
        assert "none" not in asked
        assert not lost.gpu_fault_stops, "what it has open goes on"
        status, end = outcome(Exit(code=1), None, {}, "n1", lost.gpu_fault)
        assert (status, end.code, end.facts["device"]) == (AllocationStatus.LOST, ReasonCode.GPU_FAULT, "3")
        assert well.gpu_fault is None

    asyncio.run(story())
