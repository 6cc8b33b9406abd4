"""What is tried again, with how much more, and when no more can be had."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import World, a_node, a_spec

from crater_core.lifecycle.inputs import NodeRegistered, PolicySet
from crater_core.model.allocation import AllocationStatus as A
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.resources import GpuRequest
from crater_core.model.task import OomRetry, RetryPolicy, TaskStatus
from crater_core.model.units import GIB
from crater_core.scheduling.waiting import backing_off

OOM = Reason.of(ReasonCode.OOM_KILLED, limit_bytes=GIB, peak_bytes=GIB)
NO_WAIT = 0


def an_oom_policy(attempts: int = 4, **bounds: int) -> RetryPolicy:
    return RetryPolicy(attempts, backoff_ms=NO_WAIT, on_oom=OomRetry(**bounds))


def fail(world: World, task: str, reason: Reason) -> None:
    world.cycle()
    for allocation in list(world.snapshot.by_task[task].values()):
        world.report(allocation.id, A.FAILED, reason)


def test_a_task_that_ran_out_of_memory_is_tried_with_more_until_its_attempts_are_used_up():
    world = World(a_node())
    task = world.submit(a_spec(retry=an_oom_policy(attempts=3)))
    held = []
    for _ in range(3):
        world.cycle()
        (allocation,) = world.snapshot.by_task[task].values()
        held.append(allocation.held.memory_bytes)
        world.report(allocation.id, A.FAILED, OOM)
    assert held == [GIB, GIB * 3 // 2, GIB * 9 // 4]
    ended = world.task(task)
    assert (ended.status, ended.reason, ended.attempt) == (TaskStatus.FAILED, OOM, 3)
    assert ended.spec.request.memory_bytes == GIB
    assert [event.facts.get("memory_bytes") for event in world.events if event.what == "queued_again"] == held[1:]


@pytest.mark.parametrize(
    ("bounds", "limit", "largest", "whose"),
    [
        ({"memory_max_bytes": 40 * GIB}, None, 32 * GIB, "the largest node (n1)"),
        ({"memory_max_bytes": 5 * GIB}, None, 5 * GIB, "the task itself"),
        ({}, 4 * GIB, 4 * GIB, "quota policy q"),
    ],
)
def test_growth_stops_at_the_nearest_bound_and_then_it_fails_with_the_numbers(
    bounds: dict[str, int], limit: int | None, largest: int, whose: str
):
    world = World(a_node())
    world.snapshot.settings = replace(world.snapshot.settings, attempts_max=50)
    if limit is not None:
        world.do(PolicySet(QuotaPolicy("q", ("default",), Limits(memory_bytes=limit))))
    task = world.submit(a_spec(retry=an_oom_policy(attempts=50, factor_milli=3_000, **bounds)))
    while not world.task(task).status.ended:
        fail(world, task, OOM)
    wanted = Reason.of(ReasonCode.NO_MORE_MEMORY, resource="memory", limit=largest, largest=largest, bound=whose)
    assert world.task(task).reason == wanted
    assert f"no next try can have more: {whose} allows {largest // GIB} GiB." in sentence(wanted)


def test_a_share_that_used_too_much_gpu_memory_is_tried_with_a_larger_one():
    world = World(a_node(gpus=1))
    spec = a_spec(retry=an_oom_policy())
    task = world.submit(replace(spec, request=replace(spec.request, gpu=GpuRequest(1, 0, 10_000, exclusive=False))))
    fail(world, task, Reason.of(ReasonCode.GPU_MEMORY_EXCEEDED, limit_mib=10_000, peak_mib=11_000))
    world.cycle()
    (allocation,) = world.snapshot.by_task[task].values()
    assert (allocation.held.gpu_memory_mib, allocation.held.gpu_milli) == (15_000, 375)


def test_another_failure_is_no_matter_of_memory():
    world = World(a_node())
    task = world.submit(a_spec(retry=an_oom_policy()))
    fail(world, task, Reason.of(ReasonCode.EXIT_CODE, exit_code=1))
    assert world.task(task).status is TaskStatus.FAILED


@pytest.mark.parametrize(("exit_code", "status"), [(75, TaskStatus.QUEUED), (1, TaskStatus.FAILED)])
def test_only_the_exit_codes_that_are_named_are_tried_again(exit_code: int, status: TaskStatus):
    world = World(a_node())
    task = world.submit(a_spec(retry=RetryPolicy(2, exit_codes=(75,))))
    fail(world, task, Reason.of(ReasonCode.EXIT_CODE, exit_code=exit_code))
    assert world.task(task).status is status


def test_the_wait_before_the_next_try_says_what_ended_the_last():
    world = World(a_node("n1"))
    task = world.submit(a_spec())
    world.cycle()
    world.lose("n1")
    world.do(NodeRegistered(a_node("n1")))
    said = sentence(backing_off(world.task(task), world.now_ms))
    assert said == "The next try comes in 1 s; the last one ended: The node n1 has not been heard from for 30 s."
