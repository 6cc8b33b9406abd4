"""What a task of a container tells on its way: an image that is fetched, an engine that goes down."""

from __future__ import annotations

import pytest
from world import World, a_node, a_spec

from crater_core.model.allocation import AllocationStatus as A
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.task import RetryPolicy, TaskStatus

LOST = Reason.of(ReasonCode.ENGINE_LOST, node="n1")


def _pulled(done: int) -> Reason:
    return Reason.of(ReasonCode.IMAGE_PULLING, node="n1", image="busybox:1", done_bytes=done, total_bytes=100)


def _events(world: World, what: str) -> list[Reason | None]:
    return [event.reason for event in world.events if event.what == what]


def test_a_pull_is_told_with_each_of_its_numbers_and_is_no_longer_of_interest_once_it_runs():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.place(task, "n1")
    world.report(allocation, A.STARTING)
    assert world.task(task).reason is None
    for done in (10, 60):
        world.report(allocation, A.STARTING, _pulled(done))
        assert (world.task(task).status, world.task(task).reason) == (TaskStatus.ALLOCATED, _pulled(done))
    assert _events(world, "pulling") == [_pulled(10), _pulled(60)]
    world.report(allocation, A.RUNNING)
    assert (world.task(task).status, world.task(task).reason) == (TaskStatus.RUNNING, None)
    assert world.story(task) == ["queued", "allocated", "pulling", "pulling", "started"]


def test_the_same_progress_twice_is_told_once():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.place(task, "n1")
    assert world.report(allocation, A.STARTING, _pulled(10))
    assert not world.report(allocation, A.STARTING, _pulled(10))
    assert _events(world, "pulling") == [_pulled(10)]


def test_progress_that_comes_after_the_start_changes_nothing():
    world = World(a_node())
    task = world.submit(a_spec())
    allocation = world.run(task)
    assert not world.report(allocation, A.STARTING, _pulled(99))
    assert (world.task(task).status, world.task(task).reason) == (TaskStatus.RUNNING, None)


@pytest.mark.parametrize(("again", "status"), [(True, TaskStatus.QUEUED), (False, TaskStatus.FAILED)])
def test_a_task_whose_engine_went_down_runs_again_as_after_a_lost_node(again: bool, status: TaskStatus):
    world = World(a_node())
    task = world.submit(a_spec(retry=RetryPolicy(on_node_loss=again)))
    allocation = world.run(task)
    world.report(allocation, A.LOST, LOST)
    assert (world.task(task).status, world.task(task).reason) == (status, LOST)
    assert "n1" in sentence(LOST)
    assert len(world.usage) == 1
