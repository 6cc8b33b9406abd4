"""Where an agent keeps what on its node: data and scratch directories, and the name that all of its own carries."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

from crater_agent import declare
from crater_agent.config import AgentConfig
from crater_core.configuration import bad_value
from crater_core.errors import CraterError


def make_directories(settings: AgentConfig, file: str, shared: bool) -> Path:
    """Raises BadConfiguration. `shared`: the tasks run as another user than the agent."""
    data_dir = settings.directory
    for path, field in ((data_dir, "data_dir"), (scratch_root(settings), "resource_pools (path of the disk pool)")):
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Another user's workloads have to pass through to their own scratch directory.
            path.chmod(0o711 if shared else 0o700)
        except OSError as error:
            raise bad_value(file, field, str(path), f"a directory this agent may write to ({error.strerror})") from None
    if shared:
        for parent in scratch_root(settings).relative_to(data_dir).parents if _in(settings, data_dir) else ():
            (data_dir / parent).chmod(0o711)
    return data_dir


def _in(settings: AgentConfig, data_dir: Path) -> bool:
    return scratch_root(settings).is_relative_to(data_dir)


def scratch_root(settings: AgentConfig) -> Path:
    base = declare.disk_path(settings).expanduser().absolute()
    if base == settings.directory.absolute():
        return base / "scratch"
    return base / "crater" / group_name(settings.node_name, settings.directory)


def mps_root(settings: AgentConfig) -> str:
    """Where the sockets of MPS daemons lie: not below the data directory, as their paths must be short."""
    base = "/run/crater-mps" if os.geteuid() == 0 else f"{tempfile.gettempdir()}/crater-mps-{os.geteuid()}"
    return f"{base}/{group_name(settings.node_name, settings.directory).rpartition('-')[2]}"


def group_name(node: str, data_dir: Path) -> str:
    """Two agents of one node name, with their own data, do not take each other's workloads for strays."""
    return f"crater-{node}-{hashlib.sha256(os.fsencode(data_dir.absolute())).hexdigest()[:8]}"


def only_one(data_dir: Path) -> int:
    lock = os.open(data_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise CraterError(f"another agent already uses {data_dir}") from None
    return lock
