"""Cgroups, version 1 and 2: one group an allocation, with limits the kernel holds. `open_cgroups` says which, or why none."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PERIOD_US = 100_000
V1_NEEDED = ("cpu", "cpuacct", "memory", "pids")


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_milli: int = 0
    """0: no share of its own."""
    cpu_hard: bool = True
    """False: only a weight, for what drives others and must start at once."""
    memory_bytes: int = 0
    pids_max: int = 4096


@dataclass(frozen=True, slots=True)
class Counters:
    cpu_ms: int = 0
    memory_bytes: int = 0
    """Now, without the page cache that the kernel can drop."""
    memory_max_bytes: int = 0
    """The highest the kernel saw, page cache included."""
    oom_kills: int = 0


class Group(Protocol):
    @property
    def procs_files(self) -> tuple[str, ...]:
        """Where a process writes "0" to join."""
        ...

    def pids(self) -> set[int]: ...

    def kill(self) -> None:
        """SIGKILL to everything in it; call again until `pids` is empty."""
        ...

    def counters(self) -> Counters: ...

    def remove(self) -> bool:
        """True when it is gone; False when the kernel still holds it, then try again."""
        ...


class Cgroups(Protocol):
    version: int

    def create(self, name: str, limits: Limits) -> Group: ...

    def group(self, name: str) -> Group: ...

    def names(self) -> list[str]:
        """The groups that are there."""
        ...

    def close(self) -> None:
        """Remove the agent's own level when nothing is left in it."""
        ...


@dataclass(frozen=True, slots=True)
class Mount:
    root: str
    path: Path
    controllers: frozenset[str]
    version: int


def open_cgroups(name: str, proc: Path = Path("/proc/self")) -> tuple[Cgroups | None, str]:
    """The groups under `name`, or None and the reason in words."""
    mounts = read_mounts((proc / "mountinfo").read_text())
    own = read_own((proc / "cgroup").read_text())
    why: list[str] = []
    for mount in mounts:
        if mount.version == 2:
            found, reason = _open_v2(mount, own.get("", "/"), name)
            if found is not None:
                return found, ""
            why.append(f"cgroup v2: {reason}")
    found, reason = _open_v1(mounts, own, name)
    if found is not None:
        return found, ""
    return None, "; ".join([*why, f"cgroup v1: {reason}"] if any(mount.version == 1 for mount in mounts) else why or [reason])


def read_mounts(mountinfo: str) -> list[Mount]:
    mounts: list[Mount] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        path = Path(fields[4].replace("\\040", " "))
        version = 2 if kind[0] == "cgroup2" else 1
        if version == 2:
            with contextlib.suppress(OSError):
                mounts.append(Mount(fields[3], path, frozenset(_read(path / "cgroup.controllers").split()), 2))
        else:
            mounts.append(Mount(fields[3], path, frozenset(kind[2].split(",")), 1))
    return mounts


def read_own(text: str) -> dict[str, str]:
    """Controller to the path of this process's own group; "" is version 2."""
    own: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            own[controller] = path
    return own


def memory_limit_bytes(proc: Path = Path("/proc/self")) -> int | None:
    """The memory limit this process itself lives under, as in a container; None without one."""
    own = read_own((proc / "cgroup").read_text())
    for mount in read_mounts((proc / "mountinfo").read_text()):
        if mount.version == 1 and "memory" not in mount.controllers:
            continue
        base = _inside(mount, own.get("" if mount.version == 2 else "memory", "/"))
        with contextlib.suppress(OSError, ValueError):
            limit = int(_read(base / ("memory.max" if mount.version == 2 else "memory.limit_in_bytes")))
            if limit < 2**60:
                return limit
    return None


def _open_v1(mounts: list[Mount], own: Mapping[str, str], name: str) -> tuple[Cgroups | None, str]:
    bases: dict[str, Path] = {}
    for controller in (*V1_NEEDED, "freezer"):
        mount = next((m for m in mounts if m.version == 1 and controller in m.controllers), None)
        if mount is None:
            if controller in V1_NEEDED:
                return None, f"no {controller} controller is mounted"
            continue
        bases[controller] = _inside(mount, own.get(controller, "/")) / name
    for base in dict.fromkeys(bases.values()):
        try:
            base.mkdir(exist_ok=True)
        except OSError as error:
            return None, f"{base.parent} is not writable ({error.strerror})"
    return CgroupsV1(bases), ""


def _open_v2(mount: Mount, own: str, name: str) -> tuple[Cgroups | None, str]:
    missing = {"cpu", "memory", "pids"} - mount.controllers
    if missing:
        return None, f"no {', '.join(sorted(missing))} controller"
    home = _inside(mount, own)
    try:
        if home != mount.path:
            if not _is_ours_alone(home):
                if os.geteuid() != 0:
                    return None, f"{home} is shared with other processes: run the agent as a service with Delegate=yes"
                home = mount.path
            else:
                # A group with controllers for its children holds no processes itself: ours move down first.
                leaf = home / "agent"
                leaf.mkdir(exist_ok=True)
                for pid in _read(home / "cgroup.procs").split():
                    _write(leaf / "cgroup.procs", pid)
        _write(home / "cgroup.subtree_control", "+cpu +memory +pids")
        base = home / name
        base.mkdir(exist_ok=True)
        _write(base / "cgroup.subtree_control", "+cpu +memory +pids")
    except OSError as error:
        return None, f"{home} is not ours to divide ({error.strerror}): run the agent as a service with Delegate=yes"
    return CgroupsV2(base), ""


def _is_ours_alone(home: Path) -> bool:
    """Only this process, its children and what it started earlier are in the group."""
    for pid in _read(home / "cgroup.procs").split():
        if int(pid) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"crater_agent" not in command:
            return False
    return True


def _inside(mount: Mount, own: str) -> Path:
    """The directory of an own path; a container sees its mount begin somewhere below the real root."""
    if mount.root not in ("/", "") and own.startswith(mount.root):
        own = own[len(mount.root) :]
    return mount.path / own.lstrip("/") if ".." not in own else mount.path


class CgroupsV1:
    version = 1

    def __init__(self, bases: Mapping[str, Path]) -> None:
        self._bases = dict(bases)

    def create(self, name: str, limits: Limits) -> Group:
        group = self.group(name)
        for path in group.paths.values():
            path.mkdir(exist_ok=True)
        if limits.cpu_milli:
            _write(group.paths["cpu"] / "cpu.shares", str(max(2, limits.cpu_milli * 1024 // 1000)))
            if limits.cpu_hard:
                # A kernel without bandwidth control still has the weight.
                with contextlib.suppress(FileNotFoundError):
                    _write(group.paths["cpu"] / "cpu.cfs_period_us", str(PERIOD_US))
                    _write(group.paths["cpu"] / "cpu.cfs_quota_us", str(_quota_us(limits.cpu_milli)))
        if limits.memory_bytes:
            _write(group.paths["memory"] / "memory.limit_in_bytes", str(limits.memory_bytes))
            with contextlib.suppress(OSError):
                _write(group.paths["memory"] / "memory.memsw.limit_in_bytes", str(limits.memory_bytes))
        _write(group.paths["pids"] / "pids.max", str(limits.pids_max))
        return group

    def group(self, name: str) -> GroupV1:
        return GroupV1({controller: base / name for controller, base in self._bases.items()})

    def names(self) -> list[str]:
        return _directories(self._bases["memory"])

    def close(self) -> None:
        for base in dict.fromkeys(self._bases.values()):
            with contextlib.suppress(OSError):
                base.rmdir()


class GroupV1:
    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = dict(paths)

    @property
    def procs_files(self) -> tuple[str, ...]:
        # Memory first: what joins the others without it would run without its limit.
        order = ["memory", *(name for name in self.paths if name != "memory")]
        return tuple(dict.fromkeys(str(self.paths[name] / "cgroup.procs") for name in order))

    def pids(self) -> set[int]:
        return {int(pid) for path in (self.paths["memory"], self.paths["pids"]) for pid in _lines(path / "cgroup.procs")}

    def kill(self) -> None:
        freezer = self.paths.get("freezer")
        # Frozen first, so that what forks faster than we read cannot get away.
        if freezer is not None:
            with contextlib.suppress(OSError):
                _write(freezer / "freezer.state", "FROZEN")
        try:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            if freezer is not None:
                with contextlib.suppress(OSError):
                    _write(freezer / "freezer.state", "THAWED")

    def counters(self) -> Counters:
        memory = self.paths["memory"]
        stat = _pairs(memory / "memory.stat")
        usage = _number(memory / "memory.usage_in_bytes")
        return Counters(
            cpu_ms=_number(self.paths["cpuacct"] / "cpuacct.usage") // 1_000_000,
            memory_bytes=max(0, usage - stat.get("total_inactive_file", 0)),
            memory_max_bytes=_number(memory / "memory.max_usage_in_bytes"),
            oom_kills=_pairs(memory / "memory.oom_control").get("oom_kill", 0),
        )

    def remove(self) -> bool:
        removed = [_remove(path) for path in dict.fromkeys(self.paths.values())]
        return all(removed)


class CgroupsV2:
    version = 2

    def __init__(self, base: Path) -> None:
        self._base = base

    def create(self, name: str, limits: Limits) -> Group:
        path = self._base / name
        path.mkdir(exist_ok=True)
        if limits.cpu_milli:
            shares = max(2, limits.cpu_milli * 1024 // 1000)
            _write(path / "cpu.weight", str(max(1, min(10_000, 1 + (shares - 2) * 9999 // 262_142))))
            if limits.cpu_hard:
                _write(path / "cpu.max", f"{_quota_us(limits.cpu_milli)} {PERIOD_US}")
        if limits.memory_bytes:
            _write(path / "memory.max", str(limits.memory_bytes))
            with contextlib.suppress(OSError):
                _write(path / "memory.swap.max", "0")
            # A task that lost one of its processes to the limit is not half alive: all of it goes.
            with contextlib.suppress(OSError):
                _write(path / "memory.oom.group", "1")
        _write(path / "pids.max", str(limits.pids_max))
        return GroupV2(path)

    def group(self, name: str) -> Group:
        return GroupV2(self._base / name)

    def names(self) -> list[str]:
        return _directories(self._base)

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
        return {int(pid) for path in inner for pid in _lines(path)}

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            _write(self._path / "cgroup.kill", "1")
            return
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def counters(self) -> Counters:
        usage = _number(self._path / "memory.current")
        stat = _pairs(self._path / "memory.stat")
        return Counters(
            cpu_ms=_pairs(self._path / "cpu.stat").get("usage_usec", 0) // 1000,
            memory_bytes=max(0, usage - stat.get("inactive_file", 0)),
            memory_max_bytes=_number(self._path / "memory.peak"),
            oom_kills=_pairs(self._path / "memory.events").get("oom_kill", 0),
        )

    def remove(self) -> bool:
        for root, _, _ in os.walk(self._path, topdown=False):
            _remove(Path(root))
        return not self._path.exists()


def _quota_us(cpu_milli: int) -> int:
    return max(1_000, cpu_milli * PERIOD_US // 1000)


def _read(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return file.read(1 << 16).decode()


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int:
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return 0


def _pairs(path: Path) -> dict[str, int]:
    try:
        lines = _read(path).splitlines()
    except OSError:
        return {}
    split = [line.split() for line in lines]
    return {words[0]: int(words[1]) for words in split if len(words) == 2 and words[1].isdigit()}


def _directories(base: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(base) if entry.is_dir())
    except OSError:
        return []


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
