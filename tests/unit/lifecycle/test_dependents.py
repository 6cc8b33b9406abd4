"""Tasks that come after others: they wait with a reason, are released once, and go down with what they needed."""

from __future__ import annotations

import pytest
from world import World, a_node, a_spec

from crater_core.lifecycle.inputs import TaskSubmitted
from crater_core.model.allocation import AllocationStatus as A
from crater_core.model.reason import ReasonCode, sentence
from crater_core.model.snapshot import copy_of
from crater_core.model.task import After, Array, TaskStatus, When


def after(*tasks: str, when: When = When.SUCCEEDED) -> tuple[After, ...]:
    return tuple(After(task, when) for task in tasks)


def test_a_dependent_waits_says_for_what_and_starts_when_all_have_ended_well():
    world = World(a_node())
    first, second = world.submit(a_spec("prepare")), world.submit(a_spec("fetch"))
    third = world.submit(a_spec("train", after=after(first, second)))
    assert sentence(world.task(third).reason) == f"It comes after 2 task(s) that have not ended; the first is prepare ({first})."
    plan = world.cycle()
    assert {placement.task for placement in plan.placements} == {first, second}
    assert plan.waiting[third] == world.task(third).reason
    world.end(first, A.SUCCEEDED)
    assert world.cycle().waiting[third].facts == {"count": 1, "first": f"fetch ({second})"}
    world.wait(5_000)
    world.end(second, A.SUCCEEDED)
    assert world.story(third) == ["queued", "released"]
    assert (world.task(third).queued_at_ms, world.task(third).waited_ms) == (world.now_ms, 5_000)
    assert [placement.task for placement in world.cycle().placements] == [third]


def test_when_one_fails_all_that_come_after_it_are_cancelled_down_the_chain():
    world = World(a_node())
    first = world.submit(a_spec("prepare"))
    second = world.submit(a_spec("train", after=after(first)))
    third = world.submit(a_spec("report", after=after(second)))
    cleaning = world.submit(a_spec("clean", after=after(second, when=When.ENDED)))
    alarm = world.submit(a_spec("alarm", after=after(first, when=When.FAILED)))
    world.cycle()
    world.end(first, A.FAILED, exit_code=1)
    assert [world.task(task).status for task in (second, third)] == [TaskStatus.CANCELLED] * 2
    why = f"It comes after prepare ({first}) and was to start when that had succeeded, but it has failed."
    assert sentence(world.task(second).reason) == why
    assert world.task(third).reason.facts["status"] == "cancelled"
    assert {placement.task for placement in world.cycle().placements} == {cleaning, alarm}


def test_what_waits_for_a_failure_is_cancelled_by_a_success():
    world = World(a_node())
    first = world.submit(a_spec())
    alarm = world.submit(a_spec("alarm", after=after(first, when=When.FAILED)))
    world.cycle()
    world.end(first, A.SUCCEEDED)
    assert (world.task(alarm).status, world.task(alarm).reason.code) == (TaskStatus.CANCELLED, ReasonCode.DEPENDENCY_FAILED)


def test_a_try_that_is_made_again_neither_releases_nor_cancels():
    world = World(a_node("n1"), a_node("n2"))
    first = world.submit(a_spec())
    second = world.submit(a_spec(after=after(first)))
    world.cycle()
    (allocation,) = world.snapshot.by_task[first].values()
    world.lose(allocation.node)
    assert [world.task(task).status for task in (first, second)] == [TaskStatus.QUEUED] * 2
    assert world.cycle().waiting[second].code is ReasonCode.WAITING_FOR_TASKS


def test_what_is_waited_for_is_known_again_after_a_restart():
    world = World(a_node())
    first = world.submit(a_spec())
    second = world.submit(a_spec(after=after(first)))
    world.snapshot = copy_of(world.snapshot)
    assert [placement.task for placement in world.cycle().placements] == [first]
    world.end(first, A.SUCCEEDED)
    world.snapshot = copy_of(world.snapshot)
    assert [placement.task for placement in world.cycle().placements] == [second]


@pytest.mark.parametrize("how", [A.SUCCEEDED, A.FAILED])
def test_after_an_array_means_after_all_its_members(how: A):
    world = World(a_node())
    spec = a_spec("sweep", array=Array("y1", 2))
    for index in (0, 1):
        world.do(TaskSubmitted(f"m{index}", spec, index))
    last = world.submit(a_spec("collect", after=after("y1")))
    assert world.task(last).reason.facts["first"] == "array y1"
    world.cycle()
    world.end("m0", how)
    if how is A.FAILED:
        assert world.task(last).status is TaskStatus.CANCELLED
        return
    assert world.cycle().waiting[last].code is ReasonCode.WAITING_FOR_TASKS
    world.end("m1", how)
    assert world.story(last) == ["queued", "released"]


def test_no_more_of_an_array_run_at_once_than_it_allows():
    world = World(a_node(cpu=8))
    spec = a_spec("sweep", array=Array("y1", 5, running_max=2))
    for index in range(5):
        world.do(TaskSubmitted(f"m{index}", spec, index))
    plan = world.cycle()
    assert [placement.task for placement in plan.placements] == ["m0", "m1"]
    assert sentence(plan.waiting["m4"]) == "Of its array 2 run already, the most that may at one time (2)."
    assert world.cycle().placements == ()
    world.end("m0", A.SUCCEEDED)
    assert [placement.task for placement in world.cycle().placements] == ["m2"]
    assert world.task("m2").array_index == 2
