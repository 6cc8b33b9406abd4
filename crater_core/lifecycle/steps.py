"""The legal steps of a status. Nothing else changes one."""

from __future__ import annotations

from crater_core.model.allocation import AllocationStatus as A
from crater_core.model.task import TaskStatus as T

TASK_STEPS: dict[T, frozenset[T]] = {
    T.QUEUED: frozenset({T.ALLOCATED, T.CANCELLED, T.FAILED}),
    T.ALLOCATED: frozenset({T.RUNNING, T.QUEUED, T.SUCCEEDED, T.FAILED, T.CANCELLED}),
    T.RUNNING: frozenset({T.QUEUED, T.SUCCEEDED, T.FAILED, T.CANCELLED}),
    T.SUCCEEDED: frozenset(),
    T.FAILED: frozenset(),
    T.CANCELLED: frozenset(),
    T.REFUSED: frozenset(),
}

_ENDS = frozenset({A.SUCCEEDED, A.FAILED, A.CANCELLED, A.PREEMPTED, A.LOST})

ALLOCATION_STEPS: dict[A, frozenset[A]] = {
    A.ASSIGNED: frozenset({A.STARTING, A.RUNNING, A.STOPPING}) | _ENDS,
    A.STARTING: frozenset({A.RUNNING, A.STOPPING}) | _ENDS,
    A.RUNNING: frozenset({A.STOPPING}) | _ENDS,
    A.STOPPING: _ENDS,
    A.SUCCEEDED: frozenset(),
    A.FAILED: frozenset(),
    A.CANCELLED: frozenset(),
    A.PREEMPTED: frozenset(),
    A.LOST: frozenset(),
}


class InvalidTransition(AssertionError):
    """A status was about to take a step that is not in the table: a bug, never a caller's fault."""


def task_step(before: T, after: T) -> T:
    """`after`, when the table allows the step; the same status again is no step and allowed while it has not ended."""
    if after is before and not before.ended:
        return after
    if after not in TASK_STEPS[before]:
        raise InvalidTransition(f"task: {before} -> {after}; legal: {sorted(TASK_STEPS[before])}")
    return after


def allocation_step(before: A, after: A) -> A:
    if after is before and not before.ended:
        return after
    if after not in ALLOCATION_STEPS[before]:
        raise InvalidTransition(f"allocation: {before} -> {after}; legal: {sorted(ALLOCATION_STEPS[before])}")
    return after
