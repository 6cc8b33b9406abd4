"""Which paths of the node a process sees elsewhere: what its mounts ask for, against what the operator and the kernel allow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crater_agent.privileges import CAP_SYS_ADMIN, has_capability
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import MountView

SYSTEM = tuple(map(Path, ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")))
"""Where programs and privileges come from: nothing is ever shown in their place."""
LINUX = (5, 12)
"""Whole trees of mounts are made read-only at once since then."""


@dataclass(frozen=True, slots=True)
class Bind:
    source: str
    """Without links: what the kernel will open."""
    target: str
    read_only: bool


def why_none() -> str:
    """Why this agent cannot show a path at another path; empty when it can."""
    if not has_capability(CAP_SYS_ADMIN):
        return "this agent may not mount (it does not run as root)"
    release = tuple(int(part) for part in re.findall(r"\d+", os.uname().release)[:2])
    return "" if release >= LINUX else f"this needs Linux {LINUX[0]}.{LINUX[1]} or newer"


def binds_of(mounts: Iterable[MountView], roots: Iterable[Path], no_rights: str = "") -> tuple[Bind, ...]:
    """What has to be mounted; a path that is shown where it is needs nothing. Raises RuntimeFailed."""
    roots = tuple(roots)
    binds: list[Bind] = []
    for mount in mounts:
        source, target = real_source(mount.source, roots), os.path.normpath(mount.target)
        in_place = os.path.normpath(mount.source) == target
        if in_place and (not mount.read_only or no_rights):
            continue
        if no_rights:
            raise RuntimeFailed(f"{mount.source} cannot be shown at {target}: {no_rights}; only source and target alike would do")
        if not in_place:
            _may_be_covered(target)
        bind = Bind(source, source if in_place else target, mount.read_only)
        if any(other.target == bind.target for other in binds):
            raise RuntimeFailed(f"{bind.target} is mounted twice")
        binds.append(bind)
    # What lies inside another mount comes after it.
    return tuple(sorted(binds, key=lambda bind: bind.target.count("/")))


def real_source(source: str, roots: Iterable[Path]) -> str:
    """What a mount shows: inside of the roots, and there. Raises RuntimeFailed."""
    real = inside(source, roots)
    if not Path(real).exists():
        raise RuntimeFailed(f"{source} does not exist on this node", again=1)
    return real


def inside(path: str, roots: Iterable[Path]) -> str:
    """Links are resolved first, so that none leads out of the roots. Raises RuntimeFailed."""
    real = os.path.realpath(path)
    if not any(Path(real).is_relative_to(os.path.realpath(root)) for root in roots):
        leads = f" (it leads to {real})" if real != os.path.normpath(path) else ""
        raise RuntimeFailed(f"{path}{leads} is outside this node's mount_roots")
    return real


def _may_be_covered(target: str) -> None:
    path = Path(target)
    for system in SYSTEM:
        if path.is_relative_to(system) or system.is_relative_to(path):
            raise RuntimeFailed(f"nothing can be mounted at {target}: programs and privileges of the node come from {system}")
    real = os.path.realpath(target)
    if real != target:
        raise RuntimeFailed(f"nothing can be mounted at {target}, which is a link to {real}: name that path")


def on_node(path: Path, binds: Sequence[Bind]) -> Path:
    """Where a path that a task sees is on the node."""
    for bind in reversed(binds):
        if path.is_relative_to(bind.target):
            return Path(bind.source) / path.relative_to(bind.target)
    return path


def order_of(binds: Sequence[Bind], staging: Path, scratch_root: Path, scratch: str) -> dict[str, Any]:
    """What `inside.enter` has to do, as the spawner passes it on."""
    wish = {"binds": [asdict(bind) for bind in binds], "staging": str(staging)}
    return wish | {"hide": str(scratch_root), "keep": scratch}
