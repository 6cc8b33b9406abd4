"""Cgroups of version 1: each controller has a tree of its own, and a group is a directory in each."""

# ruff: noqa: PTH102, PTH106
# (Plain strings, for the same reason as in cgroup_common.py.)

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    read,
    remove,
    shares,
    write,
)


class CgroupsV1:
    version = 1

    def __init__(self, bases: Mapping[str, Path], no_devices: str = "", no_cores: str = "") -> None:
        self._bases = {name: str(base) for name, base in bases.items()}
        self.no_devices, self.no_cores, self.no_restart = no_devices, no_cores, ""
        if "cpuset" in self._bases:
            _inherit_cores(self._bases["cpuset"])

    def create(self, name: str, limits: Limits) -> Group:
        group = self.group(name)
        paths = group.paths
        for path in paths.values():
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
        if limits.cpu_milli:
            write(f"{paths['cpu']}/cpu.shares", str(shares(limits.cpu_milli)))
            if limits.cpu_hard:
                # A kernel without bandwidth control still has the weight.
                with contextlib.suppress(FileNotFoundError):
                    write(f"{paths['cpu']}/cpu.cfs_period_us", str(PERIOD_US))
                    write(f"{paths['cpu']}/cpu.cfs_quota_us", str(quota_us(limits.cpu_milli)))
        if limits.memory_bytes:
            write(f"{paths['memory']}/memory.limit_in_bytes", str(limits.memory_bytes))
            try:
                write(f"{paths['memory']}/memory.memsw.limit_in_bytes", str(limits.memory_bytes))
            except OSError:
                # A kernel that does not count swap can still be told not to use it.
                with contextlib.suppress(OSError):
                    write(f"{paths['memory']}/memory.swappiness", "0")
        write(f"{paths['pids']}/pids.max", str(limits.pids_max))
        if limits.devices is not None and "devices" in paths:
            write(f"{paths['devices']}/devices.deny", "a")
            for file in limits.devices:
                # One that a level above does not have cannot be given.
                with contextlib.suppress(PermissionError):
                    write(f"{paths['devices']}/devices.allow", file.rule)
        if limits.cores and "cpuset" in paths:
            _inherit_cores(paths["cpuset"])
            group.keep_on(limits.cores)
        return group

    def group(self, name: str) -> GroupV1:
        return GroupV1({controller: f"{base}/{name}" for controller, base in self._bases.items()})

    def names(self) -> list[str]:
        return directories(self._bases["memory"])

    def close(self) -> None:
        for base in dict.fromkeys(self._bases.values()):
            with contextlib.suppress(OSError):
                os.rmdir(base)


def _inherit_cores(path: str) -> None:
    """A new group of this controller has no cores and no memory nodes, and takes no process."""
    for name in ("cpuset.mems", "cpuset.cpus"):
        if not read(f"{path}/{name}").strip():
            write(f"{path}/{name}", read(f"{path}/../{name}"))


class GroupV1:
    def __init__(self, paths: Mapping[str, str]) -> None:
        self.paths = dict(paths)

    @property
    def procs_files(self) -> tuple[str, ...]:
        # Memory first: what joins the others without it would run without its limit.
        order = ["memory", *(name for name in self.paths if name != "memory")]
        return tuple(dict.fromkeys(f"{self.paths[name]}/cgroup.procs" for name in order))

    def pids(self) -> set[int]:
        return {int(pid) for path in (self.paths["memory"], self.paths["pids"]) for pid in lines(f"{path}/cgroup.procs")}

    def kill(self) -> None:
        freezer = self.paths.get("freezer")
        # Frozen first, so that what forks faster than we read cannot get away.
        if freezer is not None:
            with contextlib.suppress(OSError):
                write(f"{freezer}/freezer.state", "FROZEN")
        try:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            if freezer is not None:
                with contextlib.suppress(OSError):
                    write(f"{freezer}/freezer.state", "THAWED")

    def counters(self) -> Counters:
        memory = self.paths["memory"]
        stat = pairs(f"{memory}/memory.stat", "total_inactive_file")
        usage = number(f"{memory}/memory.usage_in_bytes")
        return Counters(
            cpu_ms=number(f"{self.paths['cpuacct']}/cpuacct.usage") // 1_000_000,
            memory_bytes=max(0, usage - stat.get("total_inactive_file", 0)),
            memory_max_bytes=number(f"{memory}/memory.max_usage_in_bytes"),
            oom_kills=pairs(f"{memory}/memory.oom_control", "oom_kill").get("oom_kill", 0),
        )

    def keep_on(self, cores: Sequence[int]) -> None:
        if "cpuset" in self.paths:
            with contextlib.suppress(FileNotFoundError):
                write(f"{self.paths['cpuset']}/cpuset.cpus", core_list(cores))

    def remove(self) -> bool:
        removed = [remove(path) for path in dict.fromkeys(self.paths.values())]
        return all(removed)
