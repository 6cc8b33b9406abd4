"""A machine with one agent, its devices, and what it gives to pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from crater_core.model.resources import Amounts
from crater_core.model.units import MILLI


class PoolKind(StrEnum):
    GPU = "gpu"
    CPU = "cpu"
    MEMORY = "memory"
    DISK = "disk"


class SharingMode(StrEnum):
    EXCLUSIVE = "exclusive"
    MPS = "mps"
    MIG = "mig"
    TIME_SLICE = "time_slice"


class NodeStatus(StrEnum):
    READY = "ready"
    LOST = "lost"


class Enforcement(StrEnum):
    """How a node keeps tasks inside their CPU and memory limits."""

    ENFORCED = "enforced"
    """By cgroup: the kernel holds the limit."""
    WATCHED = "watched"
    """By sampling: a task over its limit is warned, then stopped."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU or MIG slice. Identity is the UUID; `index` is in PCI bus order."""

    uuid: str
    index: int
    model: str
    gpu_type: str
    memory_mib: int
    pool: str
    sharing: SharingMode = SharingMode.EXCLUSIVE
    overcommit_milli: int = MILLI
    """Widens memory only: 1200 gives out 1.2 times the memory."""
    numa_node: int | None = None
    links: tuple[str, ...] = ()
    """UUIDs of NVLink peers."""
    healthy: bool = True
    unwell: str = ""
    """Why it is in quarantine, in words; empty while it is healthy."""
    simulated: bool = False
    compute_capability: str = ""
    """Such as 8.0; empty where it is not known."""
    card_milli: int = MILLI
    """How much of a card it is, by compute: less than 1000 for a MIG slice. What quotas and hours count."""

    @property
    def mig_profile(self) -> str | None:
        """ "2g.20gb": the last word of a slice's model; None for a card."""
        return self.model.rpartition(" ")[2].lower() if self.sharing is SharingMode.MIG else None

    @property
    def shareable(self) -> bool:
        """Whether it gives shares. A slice does not: half of one would be a far smaller part of a card than was asked for."""
        return self.sharing in (SharingMode.MPS, SharingMode.TIME_SLICE)

    @property
    def allocatable_memory_mib(self) -> int:
        return self.memory_mib * self.overcommit_milli // MILLI


@dataclass(frozen=True, slots=True)
class ControlShare:
    """What a node keeps for run workers, outside every pool and quota."""

    slots: int = 16
    memory_bytes: int = 16 * 1024**3


@dataclass(frozen=True, slots=True)
class Drain:
    """A node is being emptied: it takes nothing new, and what still runs at the deadline goes on elsewhere."""

    by: str
    why: str = ""
    since_ms: int = 0
    deadline_ms: int | None = None
    """None: what runs may run to its end."""


def _no_names() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True)
class Node:
    """What an agent declared, and how the node is. Amounts are allocatable: reserved parts are already off."""

    name: str
    labels: Mapping[str, str] = field(default_factory=_no_names)
    pools: Mapping[str, PoolKind] = field(default_factory=lambda: {})
    """Pool name to kind, for every pool this node gives to."""
    capacity: Amounts = Amounts()
    allocatable: Amounts = Amounts()
    """Of cpu, memory and disk; GPUs are counted by device."""
    devices: tuple[GpuDevice, ...] = ()
    control: ControlShare = ControlShare()
    port_first: int = 20_000
    port_count: int = 1_000
    runtimes: tuple[str, ...] = ("process",)
    enforcement: Enforcement = Enforcement.WATCHED
    address: str = "127.0.0.1"
    """Where its service replicas can be reached."""
    agent_url: str = ""
    """Base URL of the agent's own port (metrics, logs)."""
    agent_version: str = ""
    boot_id: str = ""
    notes: tuple[str, ...] = ()
    """What the agent found odd at start ("no NVIDIA driver: ..."), for people."""

    status: NodeStatus = NodeStatus.READY
    cordoned: bool = False
    """Takes nothing new. A node that is drained is cordoned too."""
    drain: Drain | None = None
    registered_at_ms: int = 0
    heartbeat_at_ms: int = 0

    @property
    def schedulable(self) -> bool:
        return self.status is NodeStatus.READY and not self.cordoned
