"""A task's way through its statuses, told as stories."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import World, a_node, a_spec

from crater_core.errors import LeaseLost, StaleRevision
from crater_core.lifecycle.inputs import Planned, TaskSubmitted
from crater_core.lifecycle.steps import InvalidTransition, allocation_step, task_step
from crater_core.model.allocation import AllocationStatus, DeviceGrant, Gang
from crater_core.model.node import SharingMode
from crater_core.model.plan import Plan
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.task import OnDisconnect, RetryPolicy, TaskStatus
from crater_core.wire.agents import lease_of

A = AllocationStatus


def test_a_task_is_queued_allocated_run_and_succeeds():
    world = World(a_node())
    task = world.submit(a_spec())
    world.wait(500)
    allocation = world.run(task)
    world.wait(2_000)
    world.report(allocation, A.SUCCEEDED, exit_code=0)

    ended = world.task(task)
    assert (ended.status, ended.exit_code, ended.waited_ms, ended.attempt) == (TaskStatus.SUCCEEDED, 0, 500, 1)
    assert world.story(task) == ["queued", "allocated", "started", "succeeded"]
    assert world.snapshot.tasks == {}
    assert world.snapshot.allocations == {}


def test_the_same_submit_twice_is_one_task():
    world = World(a_node())
    task = world.submit(a_spec())
    assert not world.do(TaskSubmitted(task, a_spec()))


def test_a_failure_keeps_its_exit_code_and_reason():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    world.report(allocation, A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=3), 3)
    assert world.task(task).status is TaskStatus.FAILED
    assert sentence(world.task(task).reason) == "It ended with exit code 3."


def test_usage_is_closed_in_the_commit_that_ends_the_allocation():
    world = World(a_node(gpus=1))
    task = world.submit(a_spec(gpu_milli=250))
    allocation = world.run(task, grants=(DeviceGrant("GPU-n1-0", 0, 250, 10_000, SharingMode.TIME_SLICE),))
    world.wait(3_600_000)
    changes = world.report(allocation, A.SUCCEEDED, exit_code=0)
    (record,) = changes.usage
    assert (record.gpu_hours, record.core_hours, record.duration_ms) == (0.25, 1.0, 3_600_000)


def test_the_slices_of_a_card_add_up_to_no_more_than_an_hour_an_hour():
    world = World(a_node(gpus=7))
    hours: list[float] = []
    for slot in range(7):
        grant = DeviceGrant(f"GPU-n1-{slot}", 0, 1000, 9_728, SharingMode.MIG, card_milli=142)
        allocation = world.run(world.submit(a_spec(gpu_milli=1000)), grants=(grant,))
        world.wait(3_600_000)
        (record,) = world.report(allocation, A.SUCCEEDED, exit_code=0).usage
        hours.append(round(record.gpu_hours, 3))
    assert hours == [0.142] * 7


def test_a_report_that_comes_twice_or_late_changes_nothing():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    assert not world.report(allocation, A.STARTING)
    world.report(allocation, A.SUCCEEDED, exit_code=0)
    assert not world.report(allocation, A.SUCCEEDED, exit_code=0)
    assert not world.report(allocation, A.RUNNING)
    assert len(world.usage) == 1


def test_a_warning_of_the_agent_is_told_once_and_goes_when_it_has_passed():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    warning = Reason.of(ReasonCode.OVER_MEMORY, limit_bytes=100, peak_bytes=104)
    world.report(allocation, A.RUNNING, warning)
    assert not world.report(allocation, A.RUNNING, warning)
    assert world.task(task).reason == warning
    assert world.story(task) == ["queued", "allocated", "started", "warned"]
    world.report(allocation, A.RUNNING)
    assert world.task(task).reason is None
    world.report(allocation, A.SUCCEEDED, exit_code=0)
    assert world.story(task)[-2:] == ["warned", "succeeded"]


def test_a_report_under_another_token_is_refused():
    world = World(a_node())
    allocation = world.run(world.submit(a_spec()))
    with pytest.raises(LeaseLost) as refused:
        world.report(allocation, A.FAILED, token=999)
    assert refused.value.fields["token"] == 999


def test_a_plan_of_another_revision_is_refused():
    world = World(a_node())
    world.submit(a_spec())
    with pytest.raises(StaleRevision):
        world.do(Planned(Plan(world.snapshot.revision - 1), ()))


def test_a_queued_task_is_cancelled_at_once():
    world = World(a_node())
    task = world.submit(a_spec())
    world.cancel(task)
    assert world.task(task).status is TaskStatus.CANCELLED
    assert sentence(world.task(task).reason) == "It was cancelled by ann."


def test_a_running_task_is_asked_to_stop_and_ends_as_cancelled():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    world.cancel(task)
    assert world.snapshot.allocations[allocation].status is A.STOPPING
    assert not world.cancel(task), "asking again changes nothing"
    world.report(allocation, A.CANCELLED, exit_code=-15)
    assert world.task(task).status is TaskStatus.CANCELLED
    assert world.task(task).reason.code is ReasonCode.CANCELLED


def test_a_task_that_succeeded_while_its_cancel_travelled_has_succeeded():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    world.cancel(task)
    world.report(allocation, A.SUCCEEDED, exit_code=0)
    assert world.task(task).status is TaskStatus.SUCCEEDED


def test_a_victim_of_preemption_goes_back_to_the_queue_with_its_history():
    world = World(a_node())
    victim, important = world.submit(a_spec("low")), world.submit(a_spec("high"))
    allocation = world.run(victim)
    world.preempt(allocation, important)
    world.report(allocation, A.CANCELLED)
    queued = world.task(victim)
    assert (queued.status, queued.preemptions, queued.attempt) == (TaskStatus.QUEUED, 1, 1)
    assert world.ended_allocations[allocation].status is A.PREEMPTED
    world.run(victim)
    assert world.task(victim).attempt == 2


def test_a_lost_node_queues_again_what_may_run_again():
    world = World(a_node("n1"), a_node("n2"))
    again = world.submit(a_spec())
    once = world.submit(a_spec(retry=RetryPolicy(on_node_loss=False)))
    lost, kept = world.run(again), world.run(once)
    world.lose("n1")
    assert world.task(again).status is TaskStatus.QUEUED
    assert world.task(again).reason.code is ReasonCode.NODE_LOST
    assert world.ended_allocations[lost].status is A.LOST
    # What will not be started again stays where it is ...
    assert world.task(once).status is TaskStatus.RUNNING
    assert world.snapshot.allocations[kept].status is A.RUNNING
    # ... and is taken back when the node returns.
    world.hear("n1")
    assert world.task(once).reason is None
    world.report(kept, A.SUCCEEDED, exit_code=0)
    assert world.task(once).status is TaskStatus.SUCCEEDED


def test_a_late_report_of_a_lost_allocation_changes_nothing():
    world = World(a_node("n1"), a_node("n2"))
    task = world.submit(a_spec())
    lost = world.run(task)
    world.lose("n1")
    second = world.run(task, "n2")
    assert not world.report(lost, A.SUCCEEDED, exit_code=0)
    world.report(second, A.SUCCEEDED, exit_code=0)
    assert world.task(task).attempt == 2


def test_a_node_that_is_forgotten_fails_what_was_kept_for_its_return():
    world = World(a_node())
    task = world.submit(a_spec(retry=RetryPolicy(on_node_loss=False)))
    world.run(task)
    world.lose("n1")
    world.wait(3_600_000)
    world.lose("n1", forget=True)
    assert world.task(task).status is TaskStatus.FAILED
    assert world.task(task).reason.code is ReasonCode.NODE_LOST


def test_a_cancel_for_a_task_on_a_lost_node_ends_with_the_node():
    world = World(a_node())
    task = world.submit(a_spec())
    world.run(task)
    world.cancel(task)
    world.lose("n1")
    assert world.task(task).status is TaskStatus.CANCELLED


def test_attempts_over_all_causes_are_bounded():
    world = World(a_node())
    task = world.submit(a_spec())
    for _ in range(world.snapshot.settings.attempts_max):
        world.run(task)
        world.lose("n1")
        world.hear("n1")
    # The last attempt may not run again, so it is left where it is until its node is given up.
    assert world.task(task).status is TaskStatus.RUNNING
    world.lose("n1", forget=True)
    assert world.task(task).status is TaskStatus.FAILED
    assert world.task(task).attempt == world.snapshot.settings.attempts_max


def test_a_retry_on_failure_waits_longer_each_time():
    world = World(a_node())
    task = world.submit(a_spec(retry=RetryPolicy(attempts_max=3, on_failure=True, backoff_ms=1_000)))
    waits = []
    for _ in range(2):
        world.report(world.run(task), A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=1), 1)
        waits.append(world.task(task).not_before_ms - world.now_ms)
    assert waits == [1_000, 2_000]
    world.report(world.run(task), A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=1), 1)
    assert world.task(task).status is TaskStatus.FAILED


def test_a_node_fault_is_tried_again_without_asking_but_a_wrong_command_is_not():
    world = World(a_node())
    task = world.submit(a_spec())
    world.report(world.place(task, "n1"), A.FAILED, Reason.of(ReasonCode.START_FAILED, node="n1", why="no disk", retryable=1))
    assert world.task(task).status is TaskStatus.QUEUED
    world.report(
        world.place(task, "n1"), A.FAILED, Reason.of(ReasonCode.START_FAILED, node="n1", why="no such file", retryable=0)
    )
    assert world.task(task).status is TaskStatus.FAILED


def test_a_gang_ends_when_its_last_member_has_ended():
    world = World(a_node("n1"), a_node("n2"))
    task = world.submit(a_spec(members=2))
    world.place(task, "n1", "n2")
    first, second = sorted(world.snapshot.by_task[task].values(), key=lambda a: a.member)
    world.report(first.id, A.RUNNING)
    world.report(second.id, A.RUNNING)
    world.report(first.id, A.SUCCEEDED, exit_code=0)
    assert world.task(task).status is TaskStatus.RUNNING
    world.report(second.id, A.SUCCEEDED, exit_code=0)
    assert world.task(task).status is TaskStatus.SUCCEEDED
    assert len(world.usage) == 2


def test_a_member_that_fails_stops_its_gang_with_its_own_reason():
    world = World(a_node("n1"), a_node("n2"))
    task = world.submit(a_spec(members=2))
    world.place(task, "n1", "n2")
    first, second = sorted(world.snapshot.by_task[task].values(), key=lambda a: a.member)
    world.report(first.id, A.RUNNING)
    world.report(second.id, A.RUNNING)
    world.report(first.id, A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=7), 7)
    assert world.snapshot.allocations[second.id].status is A.STOPPING
    world.report(second.id, A.CANCELLED, exit_code=-15)
    ended = world.task(task)
    assert (ended.status, ended.exit_code, ended.reason.code) == (TaskStatus.FAILED, 7, ReasonCode.EXIT_CODE)


def test_all_members_are_told_where_member_0_waits_for_them():
    world = World(replace(a_node("n1"), address="10.0.0.1"), replace(a_node("n2"), address="10.0.0.2"))
    task = world.submit(a_spec(members=2))
    world.place(task, "n2", "n1")
    allocations = world.snapshot.by_task[task].values()
    assert {allocation.gang for allocation in allocations} == {Gang(2, "10.0.0.2", 30_000)}
    leases = [lease_of(world.task(task), allocation, True) for allocation in allocations]
    assert [(lease.gang.address, lease.gang.port, lease.ports, lease.members) for lease in leases if lease.gang] == [
        ("10.0.0.2", 30_000, [], 2)
    ] * 2


def test_an_elastic_gang_that_loses_a_member_starts_again_with_those_that_fit():
    world = World(a_node("n1", cpu=1), a_node("n2", cpu=1))
    task = world.submit(a_spec(members=2, members_min=1))
    world.cycle()
    assert len(world.snapshot.by_task[task]) == 2
    world.lose("n2")
    (left,) = world.snapshot.by_task[task].values()
    assert (left.node, left.status, left.reason.code) == ("n1", A.STOPPING, ReasonCode.NODE_LOST)
    world.report(left.id, A.CANCELLED, exit_code=-15)
    assert world.task(task).status is TaskStatus.QUEUED
    world.wait(1_000)
    world.cycle()
    (alone,) = world.snapshot.by_task[task].values()
    assert (alone.node, alone.member, alone.gang.members, world.task(task).attempt) == ("n1", 0, 1, 2)


def test_a_waiting_reason_is_history_only_when_its_code_changes():
    world = World(a_node())
    task = world.submit(a_spec())
    for free in (1, 2):
        reason = Reason.of(ReasonCode.NO_ROOM, resource="cpu", wanted=1000, free=free)
        world.do(Planned(Plan(world.snapshot.revision, waiting={task: reason}), ()))
    assert world.story(task) == ["queued", "waiting"]


def test_a_step_that_is_not_in_the_table_tells_its_story():
    with pytest.raises(InvalidTransition, match="succeeded -> running"):
        task_step(TaskStatus.SUCCEEDED, TaskStatus.RUNNING)
    with pytest.raises(InvalidTransition, match="lost -> running"):
        allocation_step(A.LOST, A.RUNNING)


def test_a_gang_with_two_members_on_a_lost_node_ends_both_and_is_queued_again_once() -> None:
    world = World(a_node("n1"), a_node("n2"))
    gang = world.submit(a_spec(members=3, retry=RetryPolicy()))
    world.place(gang, "n1", "n1", "n2")
    world.lose("n1")
    assert sorted(a.status.value for a in world.ended_allocations.values()) == ["lost", "lost"]
    (left,) = world.snapshot.allocations.values()
    assert (left.node, left.status) == ("n2", AllocationStatus.STOPPING)
    world.report(left.id, AllocationStatus.CANCELLED)
    assert (world.task(gang).status, world.snapshot.allocations) == (TaskStatus.QUEUED, {})


def test_a_task_that_is_kept_on_disconnect_is_never_started_elsewhere() -> None:
    world = World(a_node("n1"), a_node("n2"))
    task = world.submit(a_spec(on_disconnect=OnDisconnect.KEEP))
    world.run(task, "n1")
    world.lose("n1")
    assert (world.task(task).status, world.task(task).reason.code) == (TaskStatus.RUNNING, ReasonCode.NODE_LOST)
    world.lose("n1", forget=True)
    assert (world.task(task).status, world.task(task).reason.code) == (TaskStatus.FAILED, ReasonCode.NODE_LOST)
