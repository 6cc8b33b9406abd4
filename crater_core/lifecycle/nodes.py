"""Nodes: registered, silent, back again, cordoned, drained."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from crater_core.lifecycle.changes import NO_CHANGES, Changes
from crater_core.lifecycle.inputs import NodeCordoned, NodeDrained, NodeForgotten, NodeHeard, NodeRegistered, NodeSilent
from crater_core.lifecycle.tasks import lose_allocations, may_run_elsewhere, stop_allocation, stop_task, story
from crater_core.model.allocation import Allocation
from crater_core.model.history import Event
from crater_core.model.node import Drain, Node, NodeStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot


def _event(node: Node, what: str, now_ms: int, **facts: str | int) -> Event:
    return Event(now_ms, "node", node.name, what, None, facts)


def register(snapshot: Snapshot, asked: NodeRegistered, now_ms: int) -> Changes:
    """A node declares itself, for the first time or again. What an operator said of it (cordon, drain) stays."""
    known = snapshot.nodes.get(asked.node.name)
    node = replace(
        asked.node,
        status=NodeStatus.READY,
        cordoned=known.cordoned if known else False,
        drain=known.drain if known else None,
        registered_at_ms=now_ms,
        heartbeat_at_ms=now_ms,
    )
    if known and replace(known, registered_at_ms=now_ms, heartbeat_at_ms=now_ms) == node:
        return NO_CHANGES
    what = "registered" if known is None else "returned" if known.status is NodeStatus.LOST else "registered_again"
    events = (_event(node, what, now_ms), *_gpu_events(known, node, now_ms))
    return Changes((node,), events=events) + _taken_back(snapshot, node, now_ms)


def _gpu_events(known: Node | None, node: Node, now_ms: int) -> Iterator[Event]:
    """Devices that went into quarantine, and those that came back."""
    before = {device.uuid: device.healthy for device in known.devices} if known else {}
    for device in node.devices:
        if device.healthy != before.get(device.uuid, True):
            facts = {} if device.healthy else {"why": device.unwell}
            what = "gpu_released" if device.healthy else "gpu_quarantined"
            yield _event(node, what, now_ms, gpu=device.index, uuid=device.uuid, **facts)


def heard(snapshot: Snapshot, seen: NodeHeard, now_ms: int) -> Changes:
    node = snapshot.nodes.get(seen.node)
    if node is None or node.status is NodeStatus.READY:
        return NO_CHANGES
    back = replace(node, status=NodeStatus.READY, heartbeat_at_ms=now_ms)
    return Changes((back,), events=(_event(node, "returned", now_ms),)) + _taken_back(snapshot, node, now_ms)


def _taken_back(snapshot: Snapshot, node: Node, now_ms: int) -> Changes:
    """What was left in place while the node was silent is no longer in doubt."""
    changes = NO_CHANGES
    for allocation in snapshot.by_node.get(node.name, {}).values():
        task = snapshot.tasks[allocation.task]
        if task.reason is not None and task.reason.code is ReasonCode.NODE_LOST:
            changes += Changes((replace(task, reason=None),), events=(story(task, "node_returned", now_ms, node=node.name),))
    return changes


def silent(snapshot: Snapshot, noticed: NodeSilent, now_ms: int) -> Changes:
    """A node is lost. What may run again ends here as lost; what may not is left in place, to be taken back on return."""
    node = snapshot.nodes[noticed.node]
    changes = NO_CHANGES
    reason = Reason.of(ReasonCode.NODE_LOST, node=node.name, silent_ms=noticed.silent_ms)
    if node.status is NodeStatus.READY:
        event = _event(node, "lost", now_ms, silent_ms=noticed.silent_ms)
        changes += Changes((replace(node, status=NodeStatus.LOST),), events=(event,))
    held: dict[str, list[Allocation]] = {}
    for allocation in sorted(snapshot.by_node.get(node.name, {}).values(), key=lambda a: a.id):
        held.setdefault(allocation.task, []).append(allocation)
    for task_id, allocations in held.items():
        task = snapshot.tasks[task_id]
        if noticed.forget or task.cancel_reason is not None or may_run_elsewhere(snapshot.settings, task):
            changes += lose_allocations(snapshot, allocations, reason, now_ms)
        elif task.reason is None:
            kept = replace(task, reason=reason, ready=False)
            changes += Changes((kept,), events=(story(task, "node_silent", now_ms, reason),))
    return changes


def forget(snapshot: Snapshot, asked: NodeForgotten, now_ms: int) -> Changes:
    """A lost node leaves when it holds nothing any more. One that is cordoned stays: what an operator said of it is kept."""
    node = snapshot.nodes.get(asked.node)
    if node is None or node.status is not NodeStatus.LOST or node.cordoned or snapshot.by_node.get(node.name):
        return NO_CHANGES
    return Changes(removed=((Node, node.name),), events=(_event(node, "forgotten", now_ms),))


def cordon(snapshot: Snapshot, asked: NodeCordoned, now_ms: int) -> Changes:
    """Taking tasks again also ends a drain."""
    node = snapshot.nodes[asked.node]
    if node.cordoned == asked.cordoned:
        return NO_CHANGES
    what = "cordoned" if asked.cordoned else "uncordoned"
    moved = replace(node, cordoned=asked.cordoned, drain=node.drain if asked.cordoned else None)
    return Changes((moved,), events=(_event(node, what, now_ms, by=asked.by),))


def drain(snapshot: Snapshot, asked: NodeDrained, now_ms: int) -> Changes:
    """Take nothing new, and empty what is there by the deadline. Asking again moves the deadline."""
    node = snapshot.nodes[asked.node]
    known = node.drain
    if known is not None and (known.deadline_ms, known.why) == (asked.deadline_ms, asked.why):
        return NO_CHANGES
    since_ms = known.since_ms if known else now_ms
    drained = replace(node, cordoned=True, drain=Drain(asked.by, asked.why, since_ms, asked.deadline_ms))
    facts: dict[str, str | int] = {"by": asked.by, "why": asked.why}
    if asked.deadline_ms is not None:
        facts["wait_ms"] = max(0, asked.deadline_ms - now_ms)
    return Changes((drained,), events=(_event(node, "draining", now_ms, **facts),))


def past_deadline(snapshot: Snapshot, seen: Collection[str], now_ms: int) -> Changes:
    """Stop what still runs on nodes whose drain is over its deadline, but for tasks that are seen to already. Replicas end, for
    their service makes others.
    """
    changes = NO_CHANGES
    for name in sorted(snapshot.nodes):
        node = snapshot.nodes[name]
        if node.drain is None or node.drain.deadline_ms is None or node.drain.deadline_ms > now_ms:
            continue
        reason = drained(node)
        for task_id in sorted({allocation.task for allocation in snapshot.by_node.get(name, {}).values()}):
            task = snapshot.tasks[task_id]
            if task_id in seen or task.cancel_reason is not None:
                continue
            if task.spec.service is not None:
                changes += stop_task(snapshot, task, reason, now_ms)
                continue
            for _, allocation in sorted(snapshot.by_task[task_id].items()):
                changes += stop_allocation(snapshot, allocation, reason, now_ms, "draining")
    return changes


def drained(node: Node) -> Reason:
    """Why something of this node was stopped."""
    assert node.drain is not None, "asked only for a node that is being drained"
    why = f": {node.drain.why}" if node.drain.why else ""
    return Reason.of(ReasonCode.DRAINED, node=node.name, by=node.drain.by, why=why)
