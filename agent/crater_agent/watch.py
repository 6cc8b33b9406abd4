"""Measures workloads: from their cgroup where they have one, else by summing their processes; their disk; their logs' size."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from crater_agent import disks
from crater_agent.cgroup import Counters
from crater_agent.runtime import ProcessRuntime
from crater_agent.runtimes import Runtimes
from crater_agent.scratch import disk_bytes
from crater_agent.workload import Workload

log = logging.getLogger("crater.agent.watch")
GROUP_INTERVAL_MS = 1_000
GROUP_COST_MS = 50
"""Many cgroups are read less often: 100 of them every 5 s."""
DISK_INTERVAL_MS = 2_000
FULL_BYTES = 64 * 1024
"""A file system with less left is full."""
DISK_COST_SHARE = 20
"""A walk that takes one second is repeated every 20."""
_KEEP_SIZE_AND_PUNCH_HOLE = 0x01 | 0x02


class Watcher:
    def __init__(self, processes: ProcessRuntime, runtimes: Runtimes, log_bytes_max: int) -> None:
        self._processes = processes
        self._runtimes = runtimes
        self._log_bytes_max = log_bytes_max
        self._measuring: set[str] = set()

    def sample(self, workloads: Iterable[Workload], now_ms: int) -> None:
        """Bring the use of running workloads up to date."""
        running = [w for w in workloads if w.running]
        watched = [w for w in running if not w.record.group]
        found = self._processes.processes(watched) if watched else {}
        interval_ms = max(GROUP_INTERVAL_MS, GROUP_COST_MS * len(running)) - 100
        for workload in running:
            if workload.record.group:
                if now_ms - workload.sampled_ms >= interval_ms:
                    self._from_group(workload, now_ms)
            else:
                members = found[workload.allocation]
                cpu_ms, memory_bytes = sum(p.cpu_ms for p in members), sum(p.memory_bytes for p in members)
                self._take(workload, now_ms, cpu_ms, memory_bytes)
            self._bound_logs(workload)

    async def sample_disks(self, workloads: Iterable[Workload], now_ms: int) -> None:
        for workload in workloads:
            due = max(DISK_INTERVAL_MS, workload.disk_cost_ms * DISK_COST_SHARE)
            if workload.running and workload.record.disk_bytes and now_ms - workload.disk_sampled_ms >= due:
                workload.disk_sampled_ms = now_ms
                if workload.record.disk_held:
                    self._from_file_system(workload)
                    continue
                began = time.monotonic()
                paths = self._runtimes.of(workload.record).disk_paths(workload)
                taken = await asyncio.to_thread(_sum_of, paths)
                workload.disk_cost_ms = int((time.monotonic() - began) * 1000)
                workload.use = replace(workload.use, disk_bytes=taken)

    def last(self, workload: Workload, exit_cpu_ms: int, exit_memory_peak_bytes: int) -> Counters | None:
        """The last word on an ended workload: its cgroup's counters, or what the kernel counted for its first process.

        Gives the counters, where there is a cgroup.
        """
        counters = self._runtimes.of(workload.record).counters(workload)
        if counters is not None:
            workload.memory_max_bytes = max(workload.memory_max_bytes, counters.memory_max_bytes)
            exit_cpu_ms = max(exit_cpu_ms, counters.cpu_ms)
        if workload.record.disk_held:
            self._from_file_system(workload)
        use = workload.use
        workload.use = replace(
            use,
            cpu_ms=max(use.cpu_ms, exit_cpu_ms),
            memory_bytes=0,
            memory_peak_bytes=max(use.memory_peak_bytes, exit_memory_peak_bytes),
            cpu_percent_milli=0,
        )
        return counters

    def _from_file_system(self, workload: Workload) -> None:
        with contextlib.suppress(OSError):
            taken, left = disks.used(workload.record.scratch)
            workload.use = replace(workload.use, disk_bytes=taken)
            workload.disk_full = left < FULL_BYTES

    def _from_group(self, workload: Workload, now_ms: int) -> None:
        counters = self._runtimes.of(workload.record).counters(workload)
        if counters is not None:
            workload.memory_max_bytes = max(workload.memory_max_bytes, counters.memory_max_bytes)
            self._take(workload, now_ms, counters.cpu_ms, counters.memory_bytes)

    def _take(self, workload: Workload, now_ms: int, cpu_ms: int, memory_bytes: int) -> None:
        use, record = workload.use, workload.record
        cpu_ms = max(cpu_ms, use.cpu_ms)
        since_ms = now_ms - (workload.sampled_ms or record.started_ms)
        cores_ms = since_ms * max(record.cpu_milli, 1)
        workload.use = replace(
            use,
            cpu_ms=cpu_ms,
            memory_bytes=memory_bytes,
            memory_peak_bytes=max(use.memory_peak_bytes, memory_bytes),
            cpu_percent_milli=(cpu_ms - use.cpu_ms) * 1_000_000 // cores_ms if since_ms > 0 else use.cpu_percent_milli,
        )
        workload.sampled_ms = now_ms
        if not record.memory_bytes or memory_bytes <= record.memory_bytes:
            workload.over_memory_since_ms = None

    def _bound_logs(self, workload: Workload) -> None:
        for stream in ("stdout", "stderr"):
            drop_oldest(self._processes.records.log_file(workload.allocation, stream), self._log_bytes_max)


def _sum_of(paths: tuple[str, ...]) -> int:
    return sum(disk_bytes(path) for path in paths)


def drop_oldest(path: Path, bytes_max: int) -> None:
    """Give the oldest part of a log back to the disk. Offsets stay what they were: the part becomes a hole."""
    try:
        status = path.stat()
    except OSError:
        return
    if status.st_blocks * 512 <= bytes_max or status.st_size <= bytes_max:
        return
    fd = os.open(path, os.O_RDWR)
    try:
        # In whole blocks: the rest of a block would stay as zeros that look like content.
        length = (status.st_size - bytes_max // 2) // status.st_blksize * status.st_blksize
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.fallocate(fd, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length))
        if result != 0:
            log.warning("the file system of %s cannot drop part of a file: %s", path, os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
