"""What each task uses of a GPU: from what the driver shows of a device into the workloads, and into their records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from crater_agent.gpu_device import Device
from crater_agent.gpu_idle import idle_since
from crater_agent.gpu_reading import Reading
from crater_agent.gpu_tenants import any_use, shares_of_use
from crater_agent.records import Records
from crater_agent.workload import DeviceUse, Workload


def measure(device: Device, tenants: list[Workload], records: Records) -> bool:
    """Take in the memory of each tenant; whether one is over its share."""
    if device.tenancy is None:
        return False
    over = False
    for workload in tenants:
        if not workload.gpus:
            busy_ms, peak_mib = records.gpu_use(workload.allocation)
            workload.use = replace(workload.use, gpu_busy_ms=busy_ms, gpu_memory_peak_mib=peak_mib)
        use = workload.gpus.setdefault(device.gpu.uuid, DeviceUse())
        use.memory_mib = device.tenancy.memory_mib.get(workload.allocation, 0)
        _sum_up(workload)
        grant = device.grant_of(workload)
        over |= bool(grant.limit_mib) and use.memory_mib > grant.limit_mib
    return over


def count_use(
    device: Device,
    reading: Reading,
    tenants: list[Workload],
    owners: Mapping[int, str],
    alone: str | None,
    records: Records,
    now_ms: int,
    began_ms: int,
) -> None:
    """Take in how much each tenant has computed since the reading before; since the agent began at `began_ms` at most."""
    shares = shares_of_use(reading, owners, alone)
    for workload in tenants:
        use = workload.gpus.setdefault(device.gpu.uuid, DeviceUse())
        since_ms = now_ms - (use.sampled_ms if use.sampled_ms is not None else max(workload.record.started_ms, began_ms))
        use.percent = None if shares is None else shares.get(workload.allocation, 0)
        use.sampled_ms = now_ms
        pids = [pid for pid, allocation in owners.items() if allocation == workload.allocation]
        use.used = any_use(reading, pids, workload.allocation == alone)
        _sum_up(workload, max(0, since_ms) * (use.percent or 0) // 100)
        records.keep_gpu_use(workload.allocation, workload.use.gpu_busy_ms, workload.use.gpu_memory_peak_mib)
        # Of a device that has not been read yet nobody can tell.
        used = [workload.gpus[g.uuid].used if g.uuid in workload.gpus else None for g in workload.record.gpus]
        workload.gpu_idle_since_ms = idle_since(workload.gpu_idle_since_ms, used, now_ms)


def _sum_up(workload: Workload, busy_ms: int = 0) -> None:
    uses = workload.gpus.values()
    most = max((use.memory_mib for use in uses), default=0)
    workload.use = replace(
        workload.use,
        gpu_memory_mib=sum(use.memory_mib for use in uses),
        gpu_memory_peak_mib=max(workload.use.gpu_memory_peak_mib, most),
        gpu_percent_milli=sum((use.percent or 0) * 10 for use in uses),
        gpu_busy_ms=workload.use.gpu_busy_ms + busy_ms,
    )
