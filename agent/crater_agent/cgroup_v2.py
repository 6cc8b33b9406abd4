"""Cgroups of version 2: one tree, one directory a group."""

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
        self._base = base
        self.no_devices, self.no_cores, self.no_restart = no_devices, no_cores, no_restart

    def create(self, name: str, limits: Limits) -> Group:
        path = self._base / name
        path.mkdir(exist_ok=True)
        if limits.cpu_milli:
            write(path / "cpu.weight", str(weight(limits.cpu_milli)))
            # A kernel without the io controller, or a disk scheduler without weights, shares by need.
            with contextlib.suppress(OSError):
                write(path / "io.weight", f"default {weight(limits.cpu_milli)}")
            if limits.cpu_hard:
                write(path / "cpu.max", f"{quota_us(limits.cpu_milli)} {PERIOD_US}")
        if limits.memory_bytes:
            write(path / "memory.max", str(limits.memory_bytes))
            with contextlib.suppress(OSError):
                write(path / "memory.swap.max", "0")
            # A task that lost one of its processes to the limit is not half alive: all of it goes.
            with contextlib.suppress(OSError):
                write(path / "memory.oom.group", "1")
        write(path / "pids.max", str(limits.pids_max))
        if limits.devices is not None and not self.no_devices:
            bpf.hold(path, limits.devices)
        group = GroupV2(path)
        if limits.cores:
            group.keep_on(limits.cores)
        return group

    def group(self, name: str) -> Group:
        return GroupV2(self._base / name)

    def names(self) -> list[str]:
        return directories(self._base)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._base.rmdir()


class GroupV2:
    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def procs_files(self) -> tuple[str, ...]:
        return (str(self._path / "cgroup.procs"),)

    def pids(self) -> set[int]:
        # A task may divide its own group further.
        inner = [Path(root) / "cgroup.procs" for root, _, _ in os.walk(self._path)]
        return {int(pid) for path in inner for pid in lines(path)}

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            write(self._path / "cgroup.kill", "1")
            return
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def counters(self) -> Counters:
        usage = number(self._path / "memory.current")
        stat = pairs(self._path / "memory.stat")
        return Counters(
            cpu_ms=pairs(self._path / "cpu.stat").get("usage_usec", 0) // 1000,
            memory_bytes=max(0, usage - stat.get("inactive_file", 0)),
            memory_max_bytes=number(self._path / "memory.peak"),
            oom_kills=pairs(self._path / "memory.events").get("oom_kill", 0),
        )

    def keep_on(self, cores: Sequence[int]) -> None:
        with contextlib.suppress(FileNotFoundError):
            write(self._path / "cpuset.cpus", core_list(cores))

    def remove(self) -> bool:
        for root, _, _ in os.walk(self._path, topdown=False):
            remove(Path(root))
        return not self._path.exists()
