"""A node is emptied: replicas first, tasks at the deadline, and nobody pays for it with a retry."""

from __future__ import annotations

from world import World, a_node, a_spec

from crater_core.lifecycle.inputs import NodeCordoned, NodeDrained, NodeRegistered
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.task import RetryPolicy, TaskStatus

A = AllocationStatus


def drain(world: World, node: str = "n1", in_ms: int | None = None) -> None:
    world.do(NodeDrained(node, None if in_ms is None else world.now_ms + in_ms, "ann", "new driver"))


def stop_all(world: World) -> None:
    for allocation in list(world.snapshot.allocations.values()):
        if allocation.status is A.STOPPING:
            world.report(allocation.id, A.CANCELLED)


def test_without_a_deadline_what_runs_may_end_by_itself():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    drain(world)
    world.wait(10**9)
    assert not world.tick()
    assert not world.snapshot.nodes["n1"].schedulable
    world.report(allocation, A.SUCCEEDED, exit_code=0)
    assert world.task(task).status is TaskStatus.SUCCEEDED


def test_at_the_deadline_tasks_stop_and_are_queued_again_with_the_reason():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    drain(world, in_ms=60_000)
    world.wait(59_999)
    assert not world.tick()
    world.wait(1)
    world.tick()
    assert world.snapshot.allocations[allocation].status is A.STOPPING
    assert not world.tick(), "stopped once"
    stop_all(world)
    waiting = world.task(task)
    assert (waiting.status, world.ended_allocations[allocation].status) == (TaskStatus.QUEUED, A.PREEMPTED)
    assert sentence(waiting.reason) == "The node n1 was drained by ann: new driver."
    assert waiting.not_before_ms == world.now_ms


def test_a_drained_attempt_uses_up_no_retry():
    world = World(a_node("n1"), a_node("n2"))
    task = world.submit(a_spec(retry=RetryPolicy(2, on_failure=True)))
    world.run(task)
    drain(world, in_ms=0)
    world.tick()
    stop_all(world)
    for again in (True, False):
        world.wait(60_000)
        allocation = world.run(task, "n2")
        world.report(allocation, A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=1), 1)
        assert (task in world.snapshot.queued) is again
    assert world.task(task).attempt == 3


def test_a_gang_with_one_member_there_moves_as_a_whole():
    world = World(a_node("n1"), a_node("n2"))
    task = world.submit(a_spec(members=2))
    world.place(task, "n1", "n2")
    drain(world, in_ms=0)
    world.tick()
    stop_all(world)
    assert world.task(task).status is TaskStatus.QUEUED
    assert world.task(task).excused == 1


def test_replicas_move_before_they_stop():
    world = World(a_node("n1"), a_node("n2"))
    world.deploy(replicas=2)
    world.tick()
    for n, task in enumerate(world.replicas()):
        world.report(world.run(task.id, f"n{n + 1}", ports=(20_000 + n,)), A.RUNNING, ready=True)
    world.tick()
    drain(world, "n1")
    world.tick()
    (fresh,) = [task for task in world.replicas() if task.status is TaskStatus.QUEUED]
    assert not [task for task in world.replicas() if task.cancel_reason], "the old one serves until the new one is ready"
    world.report(world.run(fresh.id, "n2", ports=(20_009,)), A.RUNNING, ready=True)
    world.tick()
    (old,) = [task for task in world.replicas() if task.cancel_reason]
    assert old.cancel_reason.code is ReasonCode.DRAINED
    stop_all(world)
    world.tick()
    assert {a.node for a in world.snapshot.allocations.values()} == {"n2"}
    assert world.snapshot.services["web"].failures == 0


def test_a_drain_outlives_a_new_registration_and_ends_with_uncordon():
    world = World(a_node())
    drain(world, in_ms=5_000)
    world.do(NodeRegistered(a_node(cpu=9)))
    assert world.snapshot.nodes["n1"].drain is not None
    world.do(NodeCordoned("n1", False, "ann"))
    assert world.snapshot.nodes["n1"].drain is None
    assert world.snapshot.nodes["n1"].schedulable
