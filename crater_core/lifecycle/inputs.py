"""What can happen to the cluster: the inputs of `apply`. Ids are made at the edge, so that the same input twice is one."""

from __future__ import annotations

from dataclasses import dataclass

from crater_core.model.allocation import AllocationStatus, Use
from crater_core.model.node import Node
from crater_core.model.plan import Plan
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reason import Reason
from crater_core.model.reservation import Reservation
from crater_core.model.task import TaskSpec


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    id: str
    spec: TaskSpec
    array_index: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """`allocation_ids` has one fresh id for each placement of the plan, in order."""

    plan: Plan
    allocation_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CancelAsked:
    task: str
    by: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class NodeRegistered:
    node: Node


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """A heartbeat of a node that was lost: it is back. (Ordinary heartbeats change nothing and are not written.)"""

    node: str


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """No heartbeat for longer than the time-out. `forget` says that it has been away so long that nothing is expected back."""

    node: str
    silent_ms: int
    forget: bool = False


@dataclass(frozen=True, slots=True)
class NodeForgotten:
    """A node that has been lost for so long leaves the cluster, if it holds nothing."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeCordoned:
    node: str
    cordoned: bool
    by: str


@dataclass(frozen=True, slots=True)
class NodeDrained:
    """Empty the node: nothing new, and what still runs at `deadline_ms` (None: at no time) is stopped and queued again."""

    node: str
    deadline_ms: int | None
    by: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One report of an agent on one allocation. May come twice, late or out of order."""

    node: str
    allocation: str
    token: int
    status: AllocationStatus
    at_ms: int
    """By the scheduler's clock when it arrived: a node's own clock changes nothing."""
    reason: Reason | None = None
    exit_code: int | None = None
    use: Use | None = None
    ready: bool = False


@dataclass(frozen=True, slots=True)
class ReservationMade:
    """With its parts: see `find_parts`."""

    reservation: Reservation


@dataclass(frozen=True, slots=True)
class ReservationMoved:
    """With its parts where they are now: see `moved_reservations`."""

    reservation: Reservation


@dataclass(frozen=True, slots=True)
class ReservationCancelled:
    name: str
    by: str


@dataclass(frozen=True, slots=True)
class PolicySet:
    policy: QuotaPolicy


@dataclass(frozen=True, slots=True)
class PolicyRemoved:
    name: str


@dataclass(frozen=True, slots=True)
class ServiceDeployed:
    """A new service, or a new generation of one whose template differs."""

    name: str
    template: TaskSpec
    replicas: int


@dataclass(frozen=True, slots=True)
class ServiceScaled:
    name: str
    replicas: int
    by: str


@dataclass(frozen=True, slots=True)
class ServiceRemoved:
    name: str
    by: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `task_ids` are fresh ids for the replicas that services may need."""

    task_ids: tuple[str, ...] = ()


Input = (
    TaskSubmitted
    | Planned
    | CancelAsked
    | NodeRegistered
    | NodeHeard
    | NodeSilent
    | NodeForgotten
    | NodeCordoned
    | NodeDrained
    | Report
    | ReservationMade
    | ReservationMoved
    | ReservationCancelled
    | PolicySet
    | PolicyRemoved
    | ServiceDeployed
    | ServiceScaled
    | ServiceRemoved
    | Tick
)
