"""Tasks: into the queue, onto nodes, and out again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from crater_core.errors import LeaseLost, StaleRevision
from crater_core.lifecycle.changes import NO_CHANGES, Changes, joined
from crater_core.lifecycle.growth import after_oom
from crater_core.lifecycle.inputs import CancelAsked, Planned, Report, TaskSubmitted
from crater_core.lifecycle.metering import close_record
from crater_core.lifecycle.steps import allocation_step, task_step
from crater_core.model.after import waiting_for
from crater_core.model.allocation import Allocation, AllocationStatus, Gang, Placement
from crater_core.model.history import Event
from crater_core.model.reason import ROOM_WANTED_BACK, TAKEN_FOR_ANOTHER, WARNINGS, Reason, ReasonCode
from crater_core.model.resources import Amounts
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import OnDisconnect, Task, TaskSpec, TaskStatus, TaskType

BACKOFF_MAX_MS = 60_000
_NODE_LOST = Reason.of(ReasonCode.NODE_LOST)


def story(task: Task, what: str, now_ms: int, reason: Reason | None = None, **facts: str | int) -> Event:
    """One line of a task's history."""
    return Event(now_ms, "task", task.id, what, reason, facts, task.spec.group)


def submit(snapshot: Snapshot, asked: TaskSubmitted, now_ms: int) -> Changes:
    if asked.id in snapshot.tasks:
        return NO_CHANGES
    waits = waiting_for(snapshot, asked.spec) or _behind_others(snapshot, asked.spec) or Reason.of(ReasonCode.NOT_YET_LOOKED_AT)
    task = Task(
        asked.id,
        asked.spec,
        TaskStatus.QUEUED,
        now_ms,
        now_ms,
        waits,
        array_index=asked.array_index,
        foretold_ms=_foretold(snapshot, asked.spec),
    )
    return Changes(puts=(task,), events=(story(task, "queued", now_ms),))


def _behind_others(snapshot: Snapshot, spec: TaskSpec) -> Reason | None:
    """Of a large array only the first are looked at: the others know at once why they wait, and no line of history says it."""
    limit = spec.array.running_max if spec.array is not None else None
    if spec.array is None or limit is None or len(snapshot.by_array.get(spec.array.id, ())) < limit:
        return None
    return Reason.of(ReasonCode.ARRAY_LIMIT, running=limit, limit=limit)


def place(snapshot: Snapshot, planned: Planned, now_ms: int) -> Changes:
    """Make a plan true: allocations for its placements, stops for its victims, new reasons for those still waiting."""
    plan = planned.plan
    if plan.revision != snapshot.revision:
        raise StaleRevision("the plan was made at another revision", plan=plan.revision, snapshot=snapshot.revision)
    members: dict[str, list[tuple[Placement, str]]] = {}
    for placement, allocation_id in zip(plan.placements, planned.allocation_ids, strict=True):
        members.setdefault(placement.task, []).append((placement, allocation_id))
    parts = [_allocate(snapshot, snapshot.tasks[task_id], placed, now_ms) for task_id, placed in members.items()]
    for preemption in plan.preemptions:
        victim = snapshot.allocations[preemption.victim]
        reason = Reason.of(ReasonCode.PREEMPTED, by=preemption.preemptor)
        if preemption.policy:
            reason = Reason.of(ReasonCode.RECLAIMED, by=preemption.preemptor, policy=preemption.policy)
        elif preemption.reservation:
            reason = Reason.of(ReasonCode.GAVE_WAY, by=preemption.preemptor, reservation=preemption.reservation)
        parts.append(stop_allocation(snapshot, victim, reason, now_ms, "preempting"))
    for task_id, reason in (plan.waiting if plan.news is None else plan.news).items():
        task = snapshot.tasks[task_id]
        # Only a change of code is history: the numbers move in every cycle, and the newest are shown from the plan.
        if task.reason is None or task.reason.code is not reason.code:
            parts.append(Changes((replace(task, reason=reason),), events=(story(task, "waiting", now_ms, reason),)))
    return joined(parts)


def _allocate(snapshot: Snapshot, task: Task, members: list[tuple[Placement, str]], now_ms: int) -> Changes:
    assert task.status is TaskStatus.QUEUED, f"a plan placed {task.id}, which is {task.status}"
    fewest, most = task.spec.members_fewest, task.spec.members
    assert fewest <= len(members) <= most, "a gang starts whole or not at all"
    attempt, gang = task.attempt + 1, _meeting(snapshot, task, members)
    allocations = tuple(
        Allocation(
            id=allocation_id,
            task=task.id,
            attempt=attempt,
            member=placement.member,
            node=placement.node,
            token=snapshot.revision + 1,
            held=_held(task, placement),
            grants=placement.grants,
            ports=placement.ports,
            gang=gang,
            control=task.spec.type is TaskType.CONTROL,
            assigned_at_ms=now_ms,
        )
        for placement, allocation_id in members
    )
    moved = replace(
        task,
        status=task_step(task.status, TaskStatus.ALLOCATED),
        attempt=attempt,
        allocation=allocations[0].id,
        reason=None,
        waited_ms=task.waited_ms + max(0, now_ms - task.queued_at_ms),
        started_at_ms=None,
        exit_code=None,
        ready=False,
        foretold_ms=_foretold(snapshot, task.spec),
    )
    events = tuple(story(task, "allocated", now_ms, node=a.node, allocation=a.id, attempt=attempt) for a in allocations)
    return Changes((moved, *allocations), events=events)


def _meeting(snapshot: Snapshot, task: Task, members: list[tuple[Placement, str]]) -> Gang | None:
    """Where the members meet: on the node of member 0, at the port that it has for that."""
    if task.spec.members == 1:
        return None
    first = next(placement for placement, _ in members if placement.member == 0)
    assert len(first.ports) == task.spec.request.ports + 1, "member 0 has a port to meet at"
    return Gang(len(members), snapshot.nodes[first.node].address, first.ports[-1])


def _foretold(snapshot: Snapshot, spec: TaskSpec) -> int | None:
    """Run time by what others of its kind took; a declared limit needs none."""
    if spec.time_limit_ms is not None or not snapshot.settings.foretell:
        return None
    return snapshot.run_times.foretell(spec)


def _held(task: Task, placement: Placement) -> Amounts:
    request = task.asked.request
    return Amounts(
        cpu_milli=request.cpu_milli,
        memory_bytes=request.memory_bytes,
        disk_bytes=request.disk_bytes,
        gpu_milli=sum(grant.counts_milli for grant in placement.grants),
        gpu_memory_mib=sum(grant.memory_mib for grant in placement.grants),
    )


def cancel(snapshot: Snapshot, asked: CancelAsked, now_ms: int) -> Changes:
    """End a queued task at once; ask the agents to stop a placed one. Asking twice, or too late, changes nothing."""
    task = snapshot.tasks.get(asked.task)
    if task is None or task.cancel_reason is not None:
        return NO_CHANGES
    reason = Reason.of(ReasonCode.CANCELLED, by=asked.by, why=f": {asked.why}" if asked.why else "")
    return stop_task(snapshot, task, reason, now_ms)


def stop_task(snapshot: Snapshot, task: Task, reason: Reason, now_ms: int) -> Changes:
    """The task is to end as cancelled, for `reason`."""
    if task.status is TaskStatus.QUEUED:
        return finish(task, TaskStatus.CANCELLED, reason, None, now_ms)
    changes = Changes((replace(task, cancel_reason=reason),), events=(story(task, "cancelling", now_ms, reason),))
    for allocation in snapshot.by_task.get(task.id, {}).values():
        if allocation.status is not AllocationStatus.STOPPING:
            changes += stop_allocation(snapshot, allocation, reason, now_ms)
    return changes


def stop_allocation(snapshot: Snapshot, allocation: Allocation, reason: Reason, now_ms: int, what: str = "") -> Changes:
    if allocation.status is AllocationStatus.STOPPING:
        return NO_CHANGES
    stopping = replace(
        allocation, status=allocation_step(allocation.status, AllocationStatus.STOPPING), reason=reason, ready=False
    )
    task = snapshot.tasks[allocation.task]
    events = (story(task, what, now_ms, reason, allocation=allocation.id),) if what else ()
    return Changes((stopping,), events=events)


def report(snapshot: Snapshot, heard: Report, now_ms: int) -> Changes:
    """Take in what an agent says of one allocation. What has ended stays ended; another token is another lease."""
    allocation = snapshot.allocations.get(heard.allocation)
    if allocation is None:
        return NO_CHANGES
    if allocation.token != heard.token or allocation.node != heard.node:
        raise LeaseLost("the report is for another lease", allocation=heard.allocation, token=heard.token, now=allocation.token)
    if heard.use is not None:
        allocation = replace(allocation, use=heard.use)
    if heard.status.ended:
        return end_allocation(snapshot, allocation, heard.status, heard.reason, heard.exit_code, now_ms)
    return _progress(snapshot, allocation, heard, now_ms)


def _progress(snapshot: Snapshot, allocation: Allocation, heard: Report, now_ms: int) -> Changes:
    task = snapshot.tasks[allocation.task]
    if allocation.status is AllocationStatus.STOPPING or heard.status is AllocationStatus.STOPPING:
        return NO_CHANGES
    order = (AllocationStatus.ASSIGNED, AllocationStatus.STARTING, AllocationStatus.RUNNING)
    if order.index(heard.status) < order.index(allocation.status):
        return NO_CHANGES
    started = heard.status is AllocationStatus.RUNNING and allocation.started_at_ms is None
    moved = replace(
        allocation,
        status=allocation_step(allocation.status, heard.status),
        started_at_ms=now_ms if started else allocation.started_at_ms,
        ready=heard.ready,
    )
    warning, warned = _if_warning(heard.reason), _if_warning(task.reason)
    pulling = heard.reason if heard.status is AllocationStatus.STARTING and _is_pull(heard.reason) else None
    unchanged = moved == snapshot.allocations[allocation.id]
    if unchanged and warning == warned and (pulling is None or pulling == task.reason):
        return NO_CHANGES
    after, events = task, ()
    if pulling is not None:
        after, events = replace(after, reason=pulling), (story(task, "pulling", now_ms, pulling, node=allocation.node),)
    if started:
        # Why it took a while to start is no longer of interest.
        reason = None if _is_pull(task.reason) else task.reason
        status = task_step(task.status, TaskStatus.RUNNING)
        after = replace(after, status=status, started_at_ms=task.started_at_ms or now_ms, reason=reason)
        events = (story(task, "started", now_ms, node=allocation.node, allocation=allocation.id),)
    if heard.ready != task.ready and task.spec.service:
        after = replace(after, ready=heard.ready)
        events += (story(task, "ready" if heard.ready else "not_ready", now_ms, heard.reason),)
    if warning != warned:
        after = replace(after, reason=warning)
        if warning is not None:
            events += (story(task, "warned", now_ms, warning, node=allocation.node, allocation=allocation.id),)
    return Changes((moved, after) if after is not task else (moved,), events=events)


def _if_warning(reason: Reason | None) -> Reason | None:
    return reason if reason is not None and reason.code in WARNINGS else None


def _is_pull(reason: Reason | None) -> bool:
    return reason is not None and reason.code is ReasonCode.IMAGE_PULLING


def end_allocation(
    snapshot: Snapshot,
    allocation: Allocation,
    status: AllocationStatus,
    reason: Reason | None,
    exit_code: int | None,
    now_ms: int,
) -> Changes:
    """Close an allocation with its usage record, and end or queue again its task."""
    task = snapshot.tasks[allocation.task]
    if status is AllocationStatus.CANCELLED and allocation.reason is not None:
        # The agent stopped it because it was told to: the story is the one that was told.
        reason = allocation.reason
        if reason.code in ROOM_WANTED_BACK:
            status = AllocationStatus.PREEMPTED
    ended = _closed(allocation, status, reason, exit_code, now_ms)
    return _after_ends(snapshot, task, [ended], now_ms)


def lose_allocations(snapshot: Snapshot, lost: Sequence[Allocation], reason: Reason, now_ms: int) -> Changes:
    """Close all that one task held on a node that is gone. It runs again only if the node's agent surely stops it by itself."""
    task = snapshot.tasks[lost[0].task]
    ended = [_closed(allocation, AllocationStatus.LOST, reason, None, now_ms) for allocation in lost]
    return _after_ends(snapshot, task, ended, now_ms, again=may_run_elsewhere(snapshot.settings, task))


def _closed(
    allocation: Allocation, status: AllocationStatus, reason: Reason | None, exit_code: int | None, now_ms: int
) -> Allocation:
    status = allocation_step(allocation.status, status)
    return replace(allocation, status=status, reason=reason, ended_at_ms=now_ms, exit_code=exit_code, ready=False)


def _after_ends(snapshot: Snapshot, task: Task, ended: Sequence[Allocation], now_ms: int, again: bool = True) -> Changes:
    changes = Changes(tuple(ended), usage=tuple(close_record(task, one) for one in ended))
    gone = {one.id for one in ended}
    others = [other for other in snapshot.by_task.get(task.id, {}).values() if other.id not in gone]
    if others:
        return changes + _member_ended(snapshot, task, ended[0], others, now_ms)
    return changes + _task_after(snapshot, task, ended[-1], now_ms, again)


def _member_ended(snapshot: Snapshot, task: Task, ended: Allocation, others: list[Allocation], now_ms: int) -> Changes:
    """One member of a gang is gone. A success waits for the others; anything else stops them, for the same reason."""
    if ended.status is AllocationStatus.SUCCEEDED:
        return NO_CHANGES
    fault = task.fault or ended.reason or Reason.of(ReasonCode.EXIT_UNKNOWN)
    exit_code = task.exit_code if task.exit_code is not None else ended.exit_code
    changes = Changes((replace(task, fault=fault, exit_code=exit_code),))
    for other in others:
        changes += stop_allocation(snapshot, other, fault, now_ms)
    return changes


def _task_after(snapshot: Snapshot, task: Task, last: Allocation, now_ms: int, again: bool) -> Changes:
    """What becomes of a task whose last allocation has ended."""
    reason = task.fault or last.reason
    exit_code = task.exit_code if task.fault and task.exit_code is not None else last.exit_code
    if last.status is AllocationStatus.SUCCEEDED and task.fault is None:
        return finish(task, TaskStatus.SUCCEEDED, Reason.of(ReasonCode.FINISHED), exit_code, now_ms)
    if task.cancel_reason is not None:
        return finish(task, TaskStatus.CANCELLED, task.cancel_reason, exit_code, now_ms)
    if reason is not None and reason.code in ROOM_WANTED_BACK:
        return _queue_again(task, reason, now_ms, 0)
    if last.status is AllocationStatus.CANCELLED and task.fault is None:
        return finish(task, TaskStatus.CANCELLED, reason, exit_code, now_ms)
    grown = after_oom(snapshot, task, last, reason) if again else None
    if isinstance(grown, Reason):
        return finish(task, TaskStatus.FAILED, grown, exit_code, now_ms)
    if grown is not None:
        return _queue_again(replace(task, grown=grown), reason, now_ms, backoff_ms(task))
    if again and may_run_again(snapshot.settings, task, reason):
        return _queue_again(task, reason, now_ms, backoff_ms(task))
    return finish(task, TaskStatus.FAILED, reason, exit_code, now_ms)


def may_run_again(settings: Settings, task: Task, reason: Reason | None) -> bool:
    """Whether a task that ended unasked goes back to the queue. Replicas do not: their service makes new ones."""
    retry = task.spec.retry
    tried = task.attempt - task.excused
    if task.spec.service is not None or tried >= settings.attempts_max:
        return False
    code = reason.code if reason else None
    if code in (ReasonCode.NODE_LOST, ReasonCode.ENGINE_LOST, ReasonCode.GPU_FAULT):
        return retry.on_node_loss
    if code is ReasonCode.START_FAILED and reason is not None and reason.facts.get("retryable"):
        return True
    listed = code is ReasonCode.EXIT_CODE and reason is not None and reason.facts.get("exit_code") in retry.exit_codes
    return (retry.on_failure or listed) and tried < retry.attempts_max


def may_run_elsewhere(settings: Settings, task: Task) -> bool:
    """Whether it is started again when its node falls silent. Its agent knows, and has stopped it by then."""
    return task.spec.on_disconnect is OnDisconnect.STOP and may_run_again(settings, task, _NODE_LOST)


def backoff_ms(task: Task) -> int:
    return min(BACKOFF_MAX_MS, task.spec.retry.backoff_ms * 2 ** min(max(0, task.attempt - task.excused - 1), 16))


def _queue_again(task: Task, reason: Reason | None, now_ms: int, wait_ms: int) -> Changes:
    code = reason.code if reason else None
    queued = replace(
        task,
        status=task_step(task.status, TaskStatus.QUEUED),
        reason=reason,
        queued_at_ms=now_ms,
        not_before_ms=now_ms + wait_ms,
        preemptions=task.preemptions + (code in TAKEN_FOR_ANOTHER),
        excused=task.excused + (code in ROOM_WANTED_BACK),
        allocation=None,
        exit_code=None,
        fault=None,
        ready=False,
    )
    facts: dict[str, str | int] = {"attempt": task.attempt}
    if task.grown is not None:
        facts["memory_bytes"] = task.grown.memory_bytes
        facts |= {"gpu_memory_mib": task.grown.gpu.memory_mib} if task.grown.gpu is not None else {}
    return Changes((queued,), events=(Event(now_ms, "task", task.id, "queued_again", reason, facts, task.spec.group),))


def finish(task: Task, status: TaskStatus, reason: Reason | None, exit_code: int | None, now_ms: int) -> Changes:
    """The task's end, with its last line of history."""
    waited_ms = task.waited_ms + (max(0, now_ms - task.queued_at_ms) if task.status is TaskStatus.QUEUED else 0)
    ended = replace(
        task,
        status=task_step(task.status, status),
        reason=reason,
        exit_code=exit_code,
        ended_at_ms=now_ms,
        waited_ms=waited_ms,
        ready=False,
    )
    facts: dict[str, str | int] = {} if exit_code is None else {"exit_code": exit_code}
    return Changes((ended,), events=(Event(now_ms, "task", task.id, status.value, reason, facts, task.spec.group),))
