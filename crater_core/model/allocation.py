"""A placement that has been committed: this member of a task, on this node, with these devices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from crater_core.model.node import SharingMode
from crater_core.model.reason import Reason
from crater_core.model.resources import Amounts


class AllocationStatus(StrEnum):
    ASSIGNED = "assigned"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset(
    {
        AllocationStatus.SUCCEEDED,
        AllocationStatus.FAILED,
        AllocationStatus.CANCELLED,
        AllocationStatus.PREEMPTED,
        AllocationStatus.LOST,
    }
)


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """What an allocation holds of one device."""

    uuid: str
    index: int
    compute_milli: int
    memory_mib: int
    sharing: SharingMode
    simulated: bool = False
    card_milli: int = 1000
    """How much of a card the device is."""

    @property
    def counts_milli(self) -> int:
        """Compute in thousandths of a card, for quotas and hours."""
        return self.compute_milli * self.card_milli // 1000


@dataclass(frozen=True, slots=True)
class Use:
    """What a workload was measured to have used. Cumulative unless the name says otherwise."""

    cpu_ms: int = 0
    """CPU time, user and system, summed over its cores."""
    memory_bytes: int = 0
    """Now."""
    memory_peak_bytes: int = 0
    disk_bytes: int = 0
    gpu_memory_peak_mib: int = 0
    """The most on one device."""
    gpu_memory_mib: int = 0
    """Now, over all its devices."""
    gpu_busy_ms: int = 0
    """Time in which a device computed for it, summed over its devices."""
    gpu_percent_milli: int = 0
    """GPU use over the last sample, in thousandths of a device, summed over its devices."""
    cpu_percent_milli: int = 0
    """CPU use over the last sample, in thousandths of the requested cores."""


@dataclass(frozen=True, slots=True)
class Gang:
    """What every member of one attempt is told alike, so that they find each other: how many they are, and where member 0 is."""

    members: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Placement:
    """One member of a task on one node, not yet true."""

    task: str
    member: int
    node: str
    grants: tuple[DeviceGrant, ...] = ()
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    """A committed placement with its status. `token` is the epoch of its lease: reports with another token are refused."""

    id: str
    task: str
    attempt: int
    member: int
    node: str
    token: int
    held: Amounts
    grants: tuple[DeviceGrant, ...] = ()
    ports: tuple[int, ...] = ()
    """Those that the task asked for; a member of a gang has one more, the last, for the gang to meet at."""
    gang: Gang | None = None
    control: bool = False
    status: AllocationStatus = AllocationStatus.ASSIGNED
    reason: Reason | None = None
    """Why it is stopping, or why it ended."""
    assigned_at_ms: int = 0
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    exit_code: int | None = None
    use: Use = Use()
    ready: bool = False
