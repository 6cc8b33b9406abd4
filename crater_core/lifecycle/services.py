"""Services: deployed, scaled, rolled one replica at a time, and kept at their number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from crater_core.lifecycle.changes import NO_CHANGES, Changes
from crater_core.lifecycle.inputs import ServiceDeployed, ServiceRemoved, ServiceScaled, TaskSubmitted
from crater_core.lifecycle.nodes import drained
from crater_core.lifecycle.tasks import stop_task, submit
from crater_core.model.history import Event
from crater_core.model.node import Node, NodeStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.service import Service, ServiceStatus
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task

SURGE = 1
"""How many replicas above the wanted number a rollout may run."""
BACKOFF_MAX_MS = 60_000


def _event(service: Service, what: str, now_ms: int, **facts: str | int) -> Event:
    return Event(now_ms, "service", service.name, what, None, facts)


def deploy(snapshot: Snapshot, asked: ServiceDeployed, now_ms: int) -> Changes:
    """Create a service, or give it a new generation when the template differs; the same again only sets the replicas."""
    known = snapshot.services.get(asked.name)
    if known is None:
        service = Service(asked.name, asked.template, asked.replicas, created_at_ms=now_ms, changed_at_ms=now_ms)
        return Changes((service,), events=(_event(service, "deployed", now_ms, replicas=asked.replicas),))
    if known.template == asked.template and not known.removed:
        return scale(snapshot, ServiceScaled(asked.name, asked.replicas, asked.template.user), now_ms)
    service = replace(
        known,
        template=asked.template,
        replicas=asked.replicas,
        generation=known.generation + 1,
        status=ServiceStatus.DEPLOYING,
        changed_at_ms=now_ms,
        failures=0,
        retry_at_ms=0,
        removed=False,
    )
    return Changes((service,), events=(_event(service, "rolling", now_ms, generation=service.generation),))


def scale(snapshot: Snapshot, asked: ServiceScaled, now_ms: int) -> Changes:
    service = snapshot.services[asked.name]
    if service.replicas == asked.replicas:
        return NO_CHANGES
    scaled = replace(service, replicas=asked.replicas, changed_at_ms=now_ms)
    event = _event(service, "scaled", now_ms, before=service.replicas, after=asked.replicas, by=asked.by)
    return Changes((scaled,), events=(event,))


def remove(snapshot: Snapshot, asked: ServiceRemoved, now_ms: int) -> Changes:
    service = snapshot.services[asked.name]
    if service.removed:
        return NO_CHANGES
    going = replace(service, removed=True, status=ServiceStatus.REMOVING, changed_at_ms=now_ms)
    return Changes((going,), events=(_event(service, "removing", now_ms, by=asked.by),))


def replica_ended(service: Service, now_ms: int) -> Changes:
    """A replica ended without being asked to: wait longer before each further replacement, until one is ready again."""
    wait_ms = min(BACKOFF_MAX_MS, 500 * 2 ** min(service.failures, 16))
    failing = replace(service, failures=service.failures + 1, retry_at_ms=now_ms + wait_ms)
    return Changes((failing,), events=(_event(service, "replica_failed", now_ms, failures=failing.failures),))


def reconcile(snapshot: Snapshot, ids: Iterator[str], now_ms: int) -> Changes:
    """Start and stop replicas so that each service comes nearer to what is wanted of it."""
    changes = NO_CHANGES
    for name in sorted(snapshot.services):
        changes += _reconcile_one(snapshot, snapshot.services[name], ids, now_ms)
    return changes


def _reconcile_one(snapshot: Snapshot, service: Service, ids: Iterator[str], now_ms: int) -> Changes:
    live = [snapshot.tasks[task_id] for task_id in sorted(snapshot.by_service.get(service.name, ()))]
    staying = [task for task in live if task.cancel_reason is None]
    if service.removed:
        if not live:
            return Changes(removed=((Service, service.name),), events=(_event(service, "removed", now_ms),))
        return _stop(snapshot, staying, Reason.of(ReasonCode.SCALED_DOWN), now_ms)
    leaving = {task.id for task in staying if _draining_node(snapshot, task)}
    current = [task for task in staying if task.spec.service_generation == service.generation and task.id not in leaving]
    old = [task for task in staying if task.spec.service_generation != service.generation or task.id in leaving]
    here = [task for task in current if not _on_lost_node(snapshot, task)]
    ready = sum(task.ready for task in here)

    room = service.replicas + (SURGE if old else 0) - len(here) - len(old)
    starting = max(0, min(service.replicas - len(here), room)) if now_ms >= service.retry_at_ms else 0
    changes = _start(snapshot, service, starting, ids, now_ms)
    surplus = sorted(here, key=lambda task: (task.ready, -task.submitted_at_ms, task.id))[: len(here) - service.replicas]
    if len(here) > service.replicas:
        changes += _stop(snapshot, surplus, Reason.of(ReasonCode.SCALED_DOWN), now_ms)
    retiring = max(0, len(old) - max(0, service.replicas - ready))
    for task in sorted(old, key=lambda t: (t.ready, t.id))[:retiring]:
        node = _draining_node(snapshot, task) if task.spec.service_generation == service.generation else None
        reason = drained(node) if node else Reason.of(ReasonCode.SUPERSEDED)
        changes += stop_task(snapshot, task, reason, now_ms)
    return changes + _status(service, ready, bool(old), now_ms)


def _start(snapshot: Snapshot, service: Service, count: int, ids: Iterator[str], now_ms: int) -> Changes:
    changes = NO_CHANGES
    spec = replace(
        service.template,
        name=f"{service.name}-g{service.generation}",
        service=service.name,
        service_generation=service.generation,
    )
    for _, task_id in zip(range(count), ids, strict=False):
        changes += submit(snapshot, TaskSubmitted(task_id, spec), now_ms)
    return changes


def _stop(snapshot: Snapshot, tasks: list[Task], reason: Reason, now_ms: int) -> Changes:
    changes = NO_CHANGES
    for task in tasks:
        changes += stop_task(snapshot, task, reason, now_ms)
    return changes


def _status(service: Service, ready: int, rolling: bool, now_ms: int) -> Changes:
    if ready >= service.replicas and not rolling:
        status = ServiceStatus.READY
    elif service.failures or service.status in (ServiceStatus.READY, ServiceStatus.DEGRADED):
        # Scaling up a ready service is a deployment, not a fault.
        grown = service.status is ServiceStatus.READY and not service.failures
        status = ServiceStatus.DEPLOYING if grown else ServiceStatus.DEGRADED
    else:
        status = ServiceStatus.DEPLOYING
    calm = status is ServiceStatus.READY and service.failures
    if status is service.status and not calm:
        return NO_CHANGES
    moved = replace(service, status=status, failures=0 if calm else service.failures)
    events = (_event(service, status.value, now_ms, ready=ready),) if status is not service.status else ()
    return Changes((moved,), events=events)


def _draining_node(snapshot: Snapshot, task: Task) -> Node | None:
    nodes = (snapshot.nodes.get(a.node) for a in snapshot.by_task.get(task.id, {}).values())
    return next((node for node in nodes if node is not None and node.drain is not None), None)


def _on_lost_node(snapshot: Snapshot, task: Task) -> bool:
    allocations = snapshot.by_task.get(task.id, {}).values()
    return any(snapshot.nodes[a.node].status is NodeStatus.LOST for a in allocations if a.node in snapshot.nodes)
