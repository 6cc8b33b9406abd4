"""The one door to psutil: what this machine has, and how busy it is."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil

_psutil = cast(Any, psutil)


@dataclass(frozen=True, slots=True)
class Machine:
    """What is there before anything is kept back."""

    cores: int
    memory_bytes: int
    boot_id: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MachineSample:
    """Counters are cumulative since boot; the disk's room is that of the file system with the scratch directories."""

    cpu_seconds: dict[str, float]
    load_1m: float
    load_5m: float
    load_15m: float
    context_switches: int
    memory_total_bytes: int
    memory_available_bytes: int
    memory_cached_bytes: int
    swap_used_bytes: int
    disk_total_bytes: int
    disk_free_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    disk_reads: int
    disk_writes: int
    network_received_bytes: int
    network_sent_bytes: int
    network_errors: int


def discover(cgroup_memory_limit_bytes: int | None = None) -> Machine:
    """Cores this process may use, and memory; inside a container both are what the container has."""
    total = int(psutil.virtual_memory().total)
    if cgroup_memory_limit_bytes is not None:
        total = min(total, cgroup_memory_limit_bytes)
    return Machine(len(os.sched_getaffinity(0)), total, boot_id())


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def disk(path: Path) -> Disk:
    """Of the file system that holds `path`, which need not exist yet."""
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    return Disk(usage.total, usage.free)


def load_1m() -> float:
    return os.getloadavg()[0]


CPU_MODES = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")


def sample(scratch_root: Path) -> MachineSample:
    cpu, memory, swap = _psutil.cpu_times(), _psutil.virtual_memory(), _psutil.swap_memory()
    disks, network = _psutil.disk_io_counters(), _psutil.net_io_counters()
    loads, room = os.getloadavg(), disk(scratch_root)
    return MachineSample(
        cpu_seconds={mode: float(getattr(cpu, mode)) for mode in CPU_MODES},
        load_1m=loads[0],
        load_5m=loads[1],
        load_15m=loads[2],
        context_switches=int(_psutil.cpu_stats().ctx_switches),
        memory_total_bytes=int(memory.total),
        memory_available_bytes=int(memory.available),
        memory_cached_bytes=int(memory.cached),
        swap_used_bytes=int(swap.used),
        disk_total_bytes=room.total_bytes,
        disk_free_bytes=room.free_bytes,
        disk_read_bytes=int(disks.read_bytes) if disks else 0,
        disk_written_bytes=int(disks.write_bytes) if disks else 0,
        disk_reads=int(disks.read_count) if disks else 0,
        disk_writes=int(disks.write_count) if disks else 0,
        network_received_bytes=int(network.bytes_recv) if network else 0,
        network_sent_bytes=int(network.bytes_sent) if network else 0,
        network_errors=int(network.errin + network.errout) if network else 0,
    )
