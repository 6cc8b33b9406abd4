"""Cgroups of version 2: one tree, one directory a group."""

# ruff: noqa: PTH102, PTH106, PTH110
# (Plain strings, for the same reason as in cgroup_common.py.)

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from crater_agent import bpf
from crater_agent.cgroup_common import (
    PERIOD_US,
    Counters,
    Group,
    Limits,
    core_list,
    directories,
    lines,
    number,
    pairs,
    quota_us,
    remove,
    weight,
    write,
)


class CgroupsV2:
    version = 2

    def __init__(self, base: Path, no_devices: str = "", no_cores: str = "", no_restart: str = "") -> None:
        self._base = str(base)
        self.no_devices, self.no_cores, self.no_restart = no_devices, no_cores, no_restart

    def create(self, name: str, limits: Limits) -> Group:
        path = f"{self._base}/{name}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        if limits.cpu_milli:
            write(f"{path}/cpu.weight", str(weight(limits.cpu_milli)))
            # A kernel without the io controller, or a disk scheduler without weights, shares by need.
            with contextlib.suppress(OSError):
                write(f"{path}/io.weight", f"default {weight(limits.cpu_milli)}")
            if limits.cpu_hard:
                write(f"{path}/cpu.max", f"{quota_us(limits.cpu_milli)} {PERIOD_US}")
        if limits.memory_bytes:
            write(f"{path}/memory.max", str(limits.memory_bytes))
            with contextlib.suppress(OSError):
                write(f"{path}/memory.swap.max", "0")
            # A task that lost one of its processes to the limit is not half alive: all of it goes.
            with contextlib.suppress(OSError):
                write(f"{path}/memory.oom.group", "1")
        write(f"{path}/pids.max", str(limits.pids_max))
        if limits.devices is not None and not self.no_devices:
            bpf.hold(Path(path), limits.devices)
        group = GroupV2(path)
        if limits.cores:
            group.keep_on(limits.cores)
        return group

    def group(self, name: str) -> Group:
        return GroupV2(f"{self._base}/{name}")

    def names(self) -> list[str]:
        return directories(self._base)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._base)


class GroupV2:
    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def procs_files(self) -> tuple[str, ...]:
        return (f"{self._path}/cgroup.procs",)

    def pids(self) -> set[int]:
        # A task may divide its own group further.
        inner = [f"{root}/cgroup.procs" for root, _, _ in os.walk(self._path)]
        return {int(pid) for path in inner for pid in lines(path)}

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            write(f"{self._path}/cgroup.kill", "1")
            return
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def counters(self) -> Counters:
        usage = number(f"{self._path}/memory.current")
        stat = pairs(f"{self._path}/memory.stat", "inactive_file")
        return Counters(
            cpu_ms=pairs(f"{self._path}/cpu.stat", "usage_usec").get("usage_usec", 0) // 1000,
            memory_bytes=max(0, usage - stat.get("inactive_file", 0)),
            memory_max_bytes=number(f"{self._path}/memory.peak"),
            oom_kills=pairs(f"{self._path}/memory.events", "oom_kill").get("oom_kill", 0),
        )

    def keep_on(self, cores: Sequence[int]) -> None:
        with contextlib.suppress(FileNotFoundError):
            write(f"{self._path}/cpuset.cpus", core_list(cores))

    def remove(self) -> bool:
        for root, _, _ in os.walk(self._path, topdown=False):
            remove(root)
        return not os.path.exists(self._path)
