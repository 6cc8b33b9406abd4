"""Cgroups of version 1: each controller has a tree of its own, and a group is a directory in each."""

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
        self._bases = dict(bases)
        self.no_devices, self.no_cores, self.no_restart = no_devices, no_cores, ""
        if "cpuset" in self._bases:
            _inherit_cores(self._bases["cpuset"])

    def create(self, name: str, limits: Limits) -> Group:
        group = self.group(name)
        for path in group.paths.values():
            path.mkdir(exist_ok=True)
        if limits.cpu_milli:
            write(group.paths["cpu"] / "cpu.shares", str(shares(limits.cpu_milli)))
            if limits.cpu_hard:
                # A kernel without bandwidth control still has the weight.
                with contextlib.suppress(FileNotFoundError):
                    write(group.paths["cpu"] / "cpu.cfs_period_us", str(PERIOD_US))
                    write(group.paths["cpu"] / "cpu.cfs_quota_us", str(quota_us(limits.cpu_milli)))
        if limits.memory_bytes:
            write(group.paths["memory"] / "memory.limit_in_bytes", str(limits.memory_bytes))
            try:
                write(group.paths["memory"] / "memory.memsw.limit_in_bytes", str(limits.memory_bytes))
            except OSError:
                # A kernel that does not count swap can still be told not to use it.
                with contextlib.suppress(OSError):
                    write(group.paths["memory"] / "memory.swappiness", "0")
        write(group.paths["pids"] / "pids.max", str(limits.pids_max))
        if limits.devices is not None and "devices" in group.paths:
            write(group.paths["devices"] / "devices.deny", "a")
            for file in limits.devices:
                # One that a level above does not have cannot be given.
                with contextlib.suppress(PermissionError):
                    write(group.paths["devices"] / "devices.allow", file.rule)
        if limits.cores and "cpuset" in group.paths:
            _inherit_cores(group.paths["cpuset"])
            group.keep_on(limits.cores)
        return group

    def group(self, name: str) -> GroupV1:
        return GroupV1({controller: base / name for controller, base in self._bases.items()})

    def names(self) -> list[str]:
        return directories(self._bases["memory"])

    def close(self) -> None:
        for base in dict.fromkeys(self._bases.values()):
            with contextlib.suppress(OSError):
                base.rmdir()


def _inherit_cores(path: Path) -> None:
    """A new group of this controller has no cores and no memory nodes, and takes no process."""
    for name in ("cpuset.mems", "cpuset.cpus"):
        if not read(path / name).strip():
            write(path / name, read(path.parent / name))


class GroupV1:
    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = dict(paths)

    @property
    def procs_files(self) -> tuple[str, ...]:
        # Memory first: what joins the others without it would run without its limit.
        order = ["memory", *(name for name in self.paths if name != "memory")]
        return tuple(dict.fromkeys(str(self.paths[name] / "cgroup.procs") for name in order))

    def pids(self) -> set[int]:
        return {int(pid) for path in (self.paths["memory"], self.paths["pids"]) for pid in lines(path / "cgroup.procs")}

    def kill(self) -> None:
        freezer = self.paths.get("freezer")
        # Frozen first, so that what forks faster than we read cannot get away.
        if freezer is not None:
            with contextlib.suppress(OSError):
                write(freezer / "freezer.state", "FROZEN")
        try:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            if freezer is not None:
                with contextlib.suppress(OSError):
                    write(freezer / "freezer.state", "THAWED")

    def counters(self) -> Counters:
        memory = self.paths["memory"]
        stat = pairs(memory / "memory.stat")
        usage = number(memory / "memory.usage_in_bytes")
        return Counters(
            cpu_ms=number(self.paths["cpuacct"] / "cpuacct.usage") // 1_000_000,
            memory_bytes=max(0, usage - stat.get("total_inactive_file", 0)),
            memory_max_bytes=number(memory / "memory.max_usage_in_bytes"),
            oom_kills=pairs(memory / "memory.oom_control").get("oom_kill", 0),
        )

    def keep_on(self, cores: Sequence[int]) -> None:
        if "cpuset" in self.paths:
            with contextlib.suppress(FileNotFoundError):
                write(self.paths["cpuset"] / "cpuset.cpus", core_list(cores))

    def remove(self) -> bool:
        removed = [remove(path) for path in dict.fromkeys(self.paths.values())]
        return all(removed)
