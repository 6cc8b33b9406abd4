"""Which paths of the node a container gets to see: the task's mounts, its output path and its scratch directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from crater_agent.docker_spec import Bind
from crater_agent.mounts import inside, real_source
from crater_agent.runtime import Identity
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import Lease


def binds_of(lease: Lease, scratch: str, roots: Iterable[Path], identity: Identity | None) -> list[Bind]:
    """Links are resolved first, so that none leads out of the roots. Raises RuntimeFailed."""
    roots = tuple(roots)
    binds = [Bind(real_source(mount.source, roots), _clean(mount.target), mount.read_only) for mount in lease.mounts]
    if lease.output_path is not None and not any(_covers(bind, lease.output_path) for bind in binds):
        binds.append(Bind(_make_output(lease.output_path, roots, identity), _clean(lease.output_path), read_only=False))
    binds.append(Bind(scratch, scratch, read_only=False))
    targets = [bind.target for bind in binds]
    for target in targets:
        if target == "/" or targets.count(target) > 1:
            raise RuntimeFailed(f"nothing can be mounted at {target}" if target == "/" else f"{target} is mounted twice")
    return binds


def _clean(path: str) -> str:
    return os.path.normpath(path)


def _covers(bind: Bind, path: str) -> bool:
    return not bind.read_only and Path(_clean(path)).is_relative_to(bind.target)


def _make_output(path: str, roots: tuple[Path, ...], identity: Identity | None) -> str:
    """The directory for its results, made where it is missing and given to the container's user."""
    real = Path(inside(path, roots))
    try:
        missing = not real.exists()
        real.mkdir(mode=0o755, parents=True, exist_ok=True)
        if missing and identity is not None and os.geteuid() == 0:
            os.chown(real, identity.uid, identity.gid)
    except OSError as error:
        raise RuntimeFailed(f"output path {path} cannot be made: {error.strerror}", again=1) from None
    return str(real)
