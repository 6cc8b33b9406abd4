"""What a cycle decided: placements, preemptions, and a reason for every task left waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from crater_core.model.allocation import Placement
from crater_core.model.reason import Reason


@dataclass(frozen=True, slots=True)
class Preemption:
    """Stop the allocation `victim` to make room for the task `preemptor`: a more important one, one within what `policy` is
    guaranteed and had lent, or one of the project that holds `reservation`.
    """

    victim: str
    preemptor: str
    policy: str = ""
    reservation: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Made at one revision of the snapshot; not true before `apply` has re-checked it and the store has committed it."""

    revision: int
    placements: tuple[Placement, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    waiting: Mapping[str, Reason] = field(default_factory=lambda: {})
    """Task id to reason, for every queued task the cycle looked at and did not place."""
    news: Mapping[str, Reason] | None = None
    """The part of `waiting` whose code is not the one that the task has now; None when that has not been worked out. With a
    hundred thousand tasks waiting for one reason, this is what there is to write.
    """


@dataclass(frozen=True, slots=True)
class Admitted:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """`field` names the part of the request to change."""

    reason: Reason
    field: str


Admission = Admitted | Refused


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node in an explanation: its score, or the first reason it was passed over. Higher scores are better."""

    node: str
    score: float | None = None
    rejection: Reason | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every node's score or rejection for one task, and the reason shown to people."""

    task: str
    strategy: str
    reason: Reason | None
    candidates: tuple[Candidate, ...] = ()
    position: int | None = None
    """Place in the queue, 1 is next."""
