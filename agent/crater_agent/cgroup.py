"""Finds out where this agent may make cgroups, of which version, or why it may not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_agent import bpf
from crater_agent.cgroup_common import Cgroups, Counters, Group, Limits, lines, read, write
from crater_agent.cgroup_v1 import CgroupsV1, GroupV1
from crater_agent.cgroup_v2 import CgroupsV2, GroupV2
from crater_agent.privileges import CAP_SYS_ADMIN, has_capability

__all__ = [
    "Cgroups",
    "Counters",
    "Group",
    "Limits",
    "Mount",
    "group_of",
    "memory_limit_bytes",
    "open_cgroups",
    "read_mounts",
    "read_own",
]
V1_NEEDED = ("cpu", "cpuacct", "memory", "pids")
V2_NEEDED = ("cpu", "memory", "pids")
V2_WANTED = ("cpuset", "io")
"""Of version 2, where the kernel has them."""
LEAF = "agent"
"""The group for the agent itself, where its own is divided; `DelegateSubgroup` of the unit names it, too."""
NO_RESTART = "a service manager cannot start a process in a group that has been divided, as this agent's is while its tasks run"


@dataclass(frozen=True, slots=True)
class Mount:
    root: str
    path: Path
    controllers: frozenset[str]
    version: int


def open_cgroups(name: str, proc: Path = Path("/proc/self"), cores: bool = False) -> tuple[Cgroups | None, str]:
    """The groups under `name`, or None and the reason in words. `cores`: some will get cores of their own."""
    mounts = read_mounts((proc / "mountinfo").read_text())
    own = read_own((proc / "cgroup").read_text())
    why: list[str] = []
    for mount in mounts:
        if mount.version == 2:
            found, reason = _open_v2(mount, own.get("", "/"), name)
            if found is not None:
                return found, ""
            why.append(f"cgroup v2: {reason}")
    found, reason = _open_v1(mounts, own, name, cores)
    if found is not None:
        return found, ""
    return None, "; ".join([*why, f"cgroup v1: {reason}"] if any(mount.version == 1 for mount in mounts) else why or [reason])


def group_of(pid: int, mark: str) -> Group | None:
    """The group that somebody else has made for a process, to read counters and set cores; None unless `mark` is in its name."""
    try:
        own = read_own(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return None
    mounts = read_mounts(Path("/proc/self/mountinfo").read_text())
    if mark in own.get("memory", ""):
        wanted = ("memory", "cpuacct", "pids", "cpuset")
        by_controller = {name: next((m for m in mounts if name in m.controllers), None) for name in wanted}
        return GroupV1(
            {name: str(_inside(mount, own.get(name, "/"))) for name, mount in by_controller.items() if mount is not None}
        )
    if mark in own.get("", ""):
        return next((GroupV2(str(_inside(mount, own[""]))) for mount in mounts if mount.version == 2), None)
    return None


def device_procs_files(pid: int) -> tuple[str, ...]:
    """Where a process writes "0" to be held to the device files that the process `pid` may open; empty when that is not known."""
    try:
        own = read_own(Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return ()
    mounts = read_mounts(Path("/proc/self/mountinfo").read_text())
    held = next((mount for mount in mounts if "devices" in mount.controllers), None)
    if held is not None and "devices" in own:
        return (str(_inside(held, own["devices"]) / "cgroup.procs"),)
    unified = next((mount for mount in mounts if mount.version == 2), None)
    return (str(_inside(unified, own[""]) / "cgroup.procs"),) if unified is not None and "" in own else ()


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
                mounts.append(Mount(fields[3], path, frozenset(read(path / "cgroup.controllers").split()), 2))
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
            limit = int(read(base / ("memory.max" if mount.version == 2 else "memory.limit_in_bytes")))
            if limit < 2**60:
                return limit
    return None


def _open_v1(mounts: list[Mount], own: Mapping[str, str], name: str, cores: bool) -> tuple[Cgroups | None, str]:
    bases: dict[str, Path] = {}
    # Each further tree costs every start one more entry, so cores are only looked after where somebody wants it.
    for controller in (*V1_NEEDED, "freezer", "devices", *(("cpuset",) if cores else ())):
        mount = next((m for m in mounts if m.version == 1 and controller in m.controllers), None)
        if mount is None:
            if controller in V1_NEEDED:
                return None, f"no {controller} controller is mounted"
            continue
        bases[controller] = _inside(mount, own.get(controller, "/")) / name
    for controller, base in list(bases.items()):
        try:
            base.mkdir(exist_ok=True)
        except OSError as error:
            if controller in V1_NEEDED:
                return None, f"{base.parent} is not writable ({error.strerror})"
            del bases[controller]
    if "devices" in bases and not has_capability(CAP_SYS_ADMIN):
        bases.pop("devices").rmdir()
    no_devices = "" if "devices" in bases else "no devices controller that this agent may write to"
    return CgroupsV1(bases, no_devices, "" if "cpuset" in bases else "no cpuset controller that this agent may write to"), ""


def _open_v2(mount: Mount, own: str, name: str) -> tuple[Cgroups | None, str]:
    missing = set(V2_NEEDED) - mount.controllers
    if missing:
        return None, f"no {', '.join(sorted(missing))} controller"
    home, no_restart, why = _home_of(mount, own)
    if why:
        return None, f"{home} {why}: run the agent as a service with Delegate=yes"
    try:
        if not _is_root(home):
            # A group with controllers for its children holds no processes itself: ours move down first.
            leaf = home / LEAF
            leaf.mkdir(exist_ok=True)
            for pid in read(home / "cgroup.procs").split():
                write(leaf / "cgroup.procs", pid)
        base = home / name
        for path in (home, base):
            path.mkdir(exist_ok=True)
            _share_out(path, [*V2_NEEDED, *(name for name in V2_WANTED if name in mount.controllers)])
    except OSError as error:
        return None, f"{home} is not ours to divide ({error.strerror}): run the agent as a service with Delegate=yes"
    shared = read(base / "cgroup.subtree_control").replace("+", "").split()
    no_cores = "" if "cpuset" in shared else "the cpuset controller is not given to this agent"
    return CgroupsV2(base, bpf.why_not(), no_cores, no_restart), ""


def _home_of(mount: Mount, own: str) -> tuple[Path, str, str]:
    """The group to divide, why no agent could be started anew beside its tasks then, and why it cannot be divided at all."""
    home = _inside(mount, own)
    if _is_root(home):
        return home, "", ""
    # Where systemd has put us below our own group (DelegateSubgroup), what is ours begins above.
    in_leaf = home.name == LEAF
    home = home.parent if in_leaf else home
    why = _why_not_here(home)
    if (why or not in_leaf) and os.geteuid() == 0 and _is_root(mount.path):
        return mount.path, "", ""
    # A container's root is made anew with the container.
    return home, "" if in_leaf or home == mount.path else NO_RESTART, why


def _share_out(path: Path, controllers: list[str]) -> None:
    """To the groups below; a level above may have fewer than the kernel."""
    try:
        write(path / "cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
    except OSError:
        write(path / "cgroup.subtree_control", " ".join(f"+{name}" for name in V2_NEEDED))


def _is_root(home: Path) -> bool:
    """The machine's own; a container's looks like one and is none."""
    return not (home / "cgroup.type").exists()


def _why_not_here(home: Path) -> str:
    """Why the group that this process was started in cannot be divided, before anything is moved; empty when it can."""
    if not _is_ours_alone(home):
        return "is shared with other processes"
    missing = set(V2_NEEDED) - set(lines(home / "cgroup.controllers"))
    return f"has not been given {', '.join(sorted(missing))}" if missing else ""


def _is_ours_alone(home: Path) -> bool:
    """Only this process, its children and what it started earlier are in the group."""
    for pid in read(home / "cgroup.procs").split():
        if int(pid) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"crater_agent" not in command and b"crater-agent" not in command:
            return False
    return True


def _inside(mount: Mount, own: str) -> Path:
    """The directory of an own path; a container sees its mount begin somewhere below the real root."""
    if mount.root not in ("/", "") and own.startswith(mount.root):
        own = own[len(mount.root) :]
    return mount.path / own.lstrip("/") if ".." not in own else mount.path
