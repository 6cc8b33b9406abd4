"""`apply(snapshot, input, now_ms) -> Changes`: the one place where what happened becomes what is written."""

from __future__ import annotations

from crater_core.lifecycle import dependents, nodes, reservations, services, tasks
from crater_core.lifecycle.changes import NO_CHANGES, Changes
from crater_core.lifecycle.inputs import (
    CancelAsked,
    Input,
    NodeCordoned,
    NodeDrained,
    NodeForgotten,
    NodeHeard,
    NodeRegistered,
    NodeSilent,
    Planned,
    PolicyRemoved,
    PolicySet,
    Report,
    ReservationCancelled,
    ReservationMade,
    ReservationMoved,
    ServiceDeployed,
    ServiceRemoved,
    ServiceScaled,
    TaskSubmitted,
    Tick,
)
from crater_core.lifecycle.past import averages_moved
from crater_core.model.quota import QuotaPolicy
from crater_core.model.reason import ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskStatus

_ASKED_TO_END = {ReasonCode.SCALED_DOWN, ReasonCode.SUPERSEDED, ReasonCode.CANCELLED, ReasonCode.DRAINED}


def apply(snapshot: Snapshot, happened: Input, now_ms: int) -> Changes:
    """Decide what to write. Reads the snapshot and changes nothing; the same input twice changes nothing the second time.

    Raises `StaleRevision` for a plan of another revision and `LeaseLost` for a report under another token. Subjects other
    than tasks and allocations must exist: the caller looks them up first.
    """
    changes = _dispatch(snapshot, happened, now_ms)
    changes += _replicas_that_fell(snapshot, changes, now_ms)
    changes += dependents.follow(snapshot, changes, now_ms)
    return changes + averages_moved(snapshot, changes.puts, now_ms)


def _dispatch(snapshot: Snapshot, happened: Input, now_ms: int) -> Changes:
    match happened:
        case TaskSubmitted():
            return tasks.submit(snapshot, happened, now_ms)
        case Planned():
            return tasks.place(snapshot, happened, now_ms)
        case CancelAsked():
            return tasks.cancel(snapshot, happened, now_ms)
        case Report():
            return tasks.report(snapshot, happened, now_ms)
        case NodeRegistered():
            return nodes.register(snapshot, happened, now_ms)
        case NodeHeard():
            return nodes.heard(snapshot, happened, now_ms)
        case NodeSilent():
            return nodes.silent(snapshot, happened, now_ms)
        case NodeForgotten():
            return nodes.forget(snapshot, happened, now_ms)
        case NodeCordoned():
            return nodes.cordon(snapshot, happened, now_ms)
        case NodeDrained():
            return nodes.drain(snapshot, happened, now_ms)
        case ReservationMade():
            return reservations.make(snapshot, happened, now_ms)
        case ReservationMoved():
            return reservations.move(snapshot, happened, now_ms)
        case ReservationCancelled():
            return reservations.cancel(snapshot, happened, now_ms)
        case PolicySet():
            return Changes((happened.policy,)) if snapshot.policies.get(happened.policy.name) != happened.policy else NO_CHANGES
        case PolicyRemoved():
            return Changes(removed=((QuotaPolicy, happened.name),)) if happened.name in snapshot.policies else NO_CHANGES
        case ServiceDeployed():
            return services.deploy(snapshot, happened, now_ms)
        case ServiceScaled():
            return services.scale(snapshot, happened, now_ms)
        case ServiceRemoved():
            return services.remove(snapshot, happened, now_ms)
        case Tick():
            moved = services.reconcile(snapshot, iter(happened.task_ids), now_ms) + reservations.expire(snapshot, now_ms)
            return moved + nodes.past_deadline(snapshot, {put.id for put in moved.puts if isinstance(put, Task)}, now_ms)


def _replicas_that_fell(snapshot: Snapshot, changes: Changes, now_ms: int) -> Changes:
    fallen = NO_CHANGES
    for entity in changes.puts:
        if not isinstance(entity, Task) or entity.spec.service is None or not entity.status.ended:
            continue
        service = snapshot.services.get(entity.spec.service)
        asked = entity.status is TaskStatus.CANCELLED and entity.reason and entity.reason.code in _ASKED_TO_END
        if service and not asked and entity.spec.service_generation == service.generation:
            fallen = services.replica_ended(service, now_ms)
    return fallen
