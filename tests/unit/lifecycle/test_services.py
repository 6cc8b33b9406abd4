"""Services kept at their number, scaled, rolled and removed."""

from __future__ import annotations

from world import World, a_node

from crater_core.lifecycle.inputs import ServiceRemoved, ServiceScaled
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.service import ServiceStatus
from crater_core.model.task import Task, TaskStatus

A = AllocationStatus


def serve(world: World, task: Task, node: str = "n1", port: int = 0) -> str:
    """Place a replica and let it become ready."""
    number = int(task.id[1:])
    allocation = world.run(task.id, node, ports=(port or 20_000 + number,))
    world.report(allocation, A.RUNNING, ready=True)
    return allocation


def a_ready_service(replicas: int = 2) -> World:
    world = World(a_node("n1"), a_node("n2"))
    world.deploy(replicas=replicas)
    world.tick()
    for i, task in enumerate(world.replicas()):
        serve(world, task, f"n{i % 2 + 1}")
    world.tick()
    assert world.snapshot.services["web"].status is ServiceStatus.READY
    return world


def stopping(world: World) -> list[Task]:
    return [task for task in world.replicas() if task.cancel_reason is not None]


def end_stopping(world: World) -> None:
    for task in stopping(world):
        for allocation in list(world.snapshot.by_task[task.id]):
            world.report(allocation, A.CANCELLED)


def test_a_new_service_starts_its_replicas_once():
    world = World(a_node())
    world.deploy(replicas=3)
    world.tick()
    world.tick()
    assert len(world.replicas()) == 3
    assert world.snapshot.services["web"].status is ServiceStatus.DEPLOYING


def test_a_service_is_ready_when_all_its_replicas_are():
    world = a_ready_service()
    assert [task.ready for task in world.replicas()] == [True, True]


def test_the_same_deployment_again_changes_nothing():
    world = a_ready_service()
    assert not world.deploy(replicas=2)
    assert not world.tick()


def test_a_replica_that_dies_is_replaced_with_growing_patience():
    world = a_ready_service()
    for wait_ms in (500, 1_000):
        victim = next(task for task in world.replicas() if world.snapshot.by_task.get(task.id))
        (allocation,) = world.snapshot.by_task[victim.id]
        world.report(allocation, A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=1), 1)
        world.tick()
        before = len(world.replicas())
        world.wait(wait_ms)
        world.tick()
        assert len(world.replicas()) == before + 1
    assert world.snapshot.services["web"].status is ServiceStatus.DEGRADED


def test_a_replica_that_becomes_ready_ends_the_patience():
    world = a_ready_service()
    (allocation,) = world.snapshot.by_task[world.replicas()[0].id]
    world.report(allocation, A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=1), 1)
    world.wait(500)
    world.tick()
    (fresh,) = [task for task in world.replicas() if task.status is TaskStatus.QUEUED]
    serve(world, fresh)
    world.tick()
    assert (world.snapshot.services["web"].failures, world.snapshot.services["web"].status) == (0, ServiceStatus.READY)


def test_scaling_down_stops_the_newest_and_scaling_up_starts_more():
    world = a_ready_service(replicas=3)
    world.do(ServiceScaled("web", 1, "ann"))
    world.tick()
    assert len(stopping(world)) == 2
    end_stopping(world)
    assert [world.ended[i].reason.code for i in world.ended] == [ReasonCode.SCALED_DOWN] * 2
    world.do(ServiceScaled("web", 2, "ann"))
    world.tick()
    assert len(world.replicas()) == 2
    assert world.snapshot.services["web"].failures == 0


def test_a_rollout_adds_one_new_replica_before_it_takes_an_old_one():
    world = a_ready_service()
    world.deploy(replicas=2, env={"MODEL": "v2"})
    for _ in range(6):
        world.tick()
        ready = [task for task in world.replicas() if task.ready and task.cancel_reason is None]
        assert len(ready) >= 2, "a rollout never serves with fewer than the wanted replicas"
        assert len(world.replicas()) <= 4
        end_stopping(world)
        for task in world.replicas():
            if task.status is TaskStatus.QUEUED:
                serve(world, task)
    assert {task.spec.service_generation for task in world.replicas()} == {2}
    assert len(world.replicas()) == 2
    assert world.snapshot.services["web"].status is ServiceStatus.READY


def test_a_rollout_whose_replicas_never_become_ready_leaves_the_old_ones_serving():
    world = a_ready_service()
    world.deploy(replicas=2, env={"MODEL": "broken"})
    for _ in range(5):
        world.tick()
        for task in world.replicas():
            if task.status is TaskStatus.QUEUED:
                world.report(world.run(task.id), A.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=1), 1)
        world.wait(10_000)
    old = [task for task in world.replicas() if task.spec.service_generation == 1]
    assert [task.ready and task.cancel_reason is None for task in old] == [True, True]
    assert world.snapshot.services["web"].status is ServiceStatus.DEGRADED


def test_a_replica_on_a_lost_node_is_replaced_and_the_surplus_goes_when_it_returns():
    world = a_ready_service()
    world.lose("n2")
    world.tick()
    assert len(world.replicas()) == 3
    (fresh,) = [task for task in world.replicas() if task.status is TaskStatus.QUEUED]
    serve(world, fresh)
    world.hear("n2")
    world.tick()
    assert len(stopping(world)) == 1


def test_a_removed_service_stops_its_replicas_and_then_is_gone():
    world = a_ready_service()
    world.do(ServiceRemoved("web", "ann"))
    world.tick()
    assert len(stopping(world)) == 2
    end_stopping(world)
    world.tick()
    assert world.snapshot.services == {}
