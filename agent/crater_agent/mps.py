"""Shares of a GPU by NVIDIA's Multi-Process Service: what a client is told, what its daemon allows at most, and what the control
program's answers say. Pure.

Source: NVIDIA, "Multi-Process Service", and the manual page nvidia-cuda-mps-control(1). A daemon is started with one device
visible, so inside it that device is number 0 whatever its index on the node: memory limits are keyed by that number (limits
keyed by UUID are taken and not applied).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_core.errors import RuntimeFailed
from crater_core.model.node import SharingMode
from crater_core.wire.agents import Lease
from crater_core.wire.resources import GrantView

DEVICE = 0
"""The one device, as the daemon counts."""
SUN_PATH_MAX = 107
"""Bytes in the name of a socket."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one client, or the most that any client of a daemon may have."""

    percent: int = 100
    """Of the device's threads."""
    memory_mib: int = 0
    """0: no limit."""


def limits_of(compute_milli: int, memory_mib: int) -> Limits:
    """Whole per cent, rounded down so that shares that fit together do so here too; at least one."""
    return Limits(max(1, compute_milli // 10), memory_mib)


def ceiling(tenants: Iterable[Limits]) -> Limits:
    """What the daemon itself allows: the largest share there. A client that forgets its own limits has no more than that."""
    found = list(tenants)
    if not found:
        return Limits()
    unlimited = any(one.memory_mib == 0 for one in found)
    return Limits(max(one.percent for one in found), 0 if unlimited else max(one.memory_mib for one in found))


def pipe_directory(root: str, index: int) -> str:
    return f"{root}/{index}/pipe"


def shares_by_mps(lease: Lease) -> list[GrantView]:
    """What a task has of real devices as a client of their daemons."""
    return [grant for grant in lease.devices if grant.sharing == SharingMode.MPS and not grant.simulated]


def client_environment(lease: Lease, root: str) -> dict[str, str]:
    """What makes a CUDA program a client of its device's daemon, within its share; empty for a task without such a share.
    Raises RuntimeFailed for shares of several devices: a program has one daemon, and each daemon has one device."""
    grants = shares_by_mps(lease)
    if not grants:
        return {}
    if len(grants) > 1:
        raise RuntimeFailed("a task can have a share of one GPU by MPS, not of several: ask for one, or for whole GPUs")
    limits = limits_of(grants[0].compute_milli, grants[0].memory_mib)
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory(root, grants[0].index),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(limits.percent),
    }
    if limits.memory_mib:
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{DEVICE}={limits.memory_mib}M"
    return env


def too_long(root: Path) -> bool:
    """Whether the daemon could not make its sockets there."""
    return len(f"{pipe_directory(str(root), 999)}/control_privileged") > SUN_PATH_MAX


def numbers(answer: str) -> list[int]:
    """Process ids, one a line. Raises ValueError for any other answer."""
    return [int(line) for line in answer.split()]


def is_percent(answer: str, percent: int) -> bool:
    """Whether the daemon says that it allows so much: it answers with a fraction, such as `25.0`."""
    try:
        return abs(float(answer.strip().rstrip("%")) - percent) < 1
    except ValueError:
        return False


def is_memory(answer: str, memory_mib: int) -> bool:
    """Whether the daemon says that it allows so much memory: `2048M`, `2G`, or bytes."""
    text = answer.strip().upper().removesuffix("B")
    units = {"G": 1024, "M": 1, "K": 1 / 1024}
    try:
        amount = float(text[:-1]) * units[text[-1]] if text[-1:] in units else float(text) / 1024**2
    except ValueError:
        return False
    return abs(amount - memory_mib) < 1


def without_mps(
    computing: Mapping[int, str], clients: Collection[int], since_ms: Mapping[int, int], now_ms: int
) -> dict[int, int]:
    """Processes that compute on the device and are no clients of its daemon, and since when they were seen so.

    `computing`: allocation by pid; `since_ms`: the answer before.
    """
    return {pid: since_ms.get(pid, now_ms) for pid in computing if pid not in clients}
