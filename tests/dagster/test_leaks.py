"""What holds compute without a live run, and runs that live without a worker, are found and settled."""

from __future__ import annotations

import pytest
from dagster import DagsterRunStatus, SensorResult, build_sensor_context
from dagster._core.events import DagsterEvent, DagsterEventType
from dagster_world import World
from harness import wait_until

from crater_core.clock import ManualClock
from crater_core.wire.resources import AmountsView
from crater_core.wire.tasks import TaskView
from crater_dagster import build_leak_sensor
from crater_dagster._dagster import storage_id
from crater_dagster.config import group_of
from crater_dagster.leaks import Leaks, Suspects, find_leaks


def a_task(run: str, role: str = "step", owner: str = "mine", **fields: object) -> TaskView:
    labels = {"crater/role": role, "dagster/instance": owner}
    basics = {
        "id": f"{run}-{role}",
        "name": "n",
        "type": "batch",
        "status": "running",
        "project": "p",
        "user": "u",
        "priority": 50,
    }
    return TaskView.model_validate(
        {**basics, "group": group_of(run), "labels": labels, "requested": AmountsView(), "submitted_at_ms": 0, **fields}
    )


def test_a_run_with_its_worker_is_no_leak():
    tasks = [a_task("r1", "run"), a_task("r1")]
    assert find_leaks(tasks, {"r1": DagsterRunStatus.STARTED}, "mine") == Leaks()


@pytest.mark.parametrize("status", [DagsterRunStatus.SUCCESS, DagsterRunStatus.FAILURE, DagsterRunStatus.CANCELED])
def test_a_task_of_a_run_that_is_over_is_a_leak(status: DagsterRunStatus):
    assert find_leaks([a_task("r1")], {"r1": status}, "mine") == Leaks(runs_over=frozenset({"r1"}))


def test_a_task_of_an_unknown_run_is_a_leak_only_where_it_is_this_instances_own():
    tasks = [a_task("deleted"), a_task("theirs", owner="another")]
    assert find_leaks(tasks, {}, "mine") == Leaks(runs_over=frozenset({"deleted"}))
    assert find_leaks(tasks, {}, None) == Leaks()


def test_a_run_whose_worker_is_not_there_is_alone():
    assert find_leaks([a_task("r1")], {"r1": DagsterRunStatus.STARTED}, "mine") == Leaks(runs_alone=frozenset({"r1"}))


def test_tasks_that_are_none_of_dagsters_and_those_being_stopped_are_left_alone():
    tasks = [a_task("r1", cancelling=True), a_task("x", group="a-group-of-somebody")]
    assert find_leaks(tasks, {"r1": DagsterRunStatus.CANCELED}, "mine") == Leaks()


def test_a_leak_is_what_stays_one_for_the_whole_grace():
    leaks = Leaks(runs_over=frozenset({"r1"}))
    first = Suspects().seen(leaks, 1_000)
    assert first.proven(60_000, 60_999) == set()
    kept = Suspects.from_text(first.to_text()).seen(leaks, 61_000)
    assert kept.proven(60_000, 61_000) == {"r1"}
    assert kept.seen(Leaks(), 62_000).seen(leaks, 63_000).proven(60_000, 63_000) == set()


def test_a_clock_that_jumps_back_makes_no_leak_older():
    leaks = Leaks(runs_over=frozenset({"r1"}))
    later = Suspects().seen(leaks, 100_000).seen(leaks, 50_000)
    assert later.proven(60_000, 60_000) == set()


def test_a_cursor_of_another_kind_counts_as_none():
    assert Suspects.from_text("[1, 2") == Suspects.from_text("[3]") == Suspects.from_text(None) == Suspects()


def _tick(world: World, clock: ManualClock, cursor: str | None) -> SensorResult:
    sensor = build_leak_sensor(grace_seconds=60, clock=clock)
    with build_sensor_context(instance=world.instance, cursor=cursor) as context:
        result = sensor._raw_fn(context)
    assert isinstance(result, SensorResult)
    return result


def test_the_sensor_settles_both_kinds_and_leaves_the_rest(logging_world: World):
    world, clock = logging_world, ManualClock(1_000_000)
    over = world.launch("in_one_process")
    assert world.finish(over) == "SUCCESS", world.story(over)
    owner = storage_id(world.instance)
    assert owner is not None
    labels = {"crater/role": "step", "dagster/instance": owner}
    forgotten = world.client.submit(
        {"name": "forgotten", "command": ["sleep", "600"], "group": group_of(over), "labels": labels, "resources": {"cpu": 0.1}}
    )
    foreign = world.client.submit(
        {
            "name": "foreign",
            "command": ["sleep", "600"],
            "group": group_of("another-instances-run"),
            "labels": {**labels, "dagster/instance": "another"},
            "resources": {"cpu": 0.1},
        }
    )
    alone = world.create("in_one_process")
    starting = DagsterEvent(DagsterEventType.PIPELINE_STARTING.value, alone.job_name, message="starting")
    world.instance.report_dagster_event(starting, alone.run_id)
    first = _tick(world, clock, None)
    assert not world.client.task(forgotten.id).cancelling
    clock.advance(61_000)
    _tick(world, clock, first.cursor)
    wait_until(lambda: world.client.task(forgotten.id).status == "cancelled", 20, "the forgotten task is stopped")
    assert world.run(alone.run_id).status is DagsterRunStatus.FAILURE
    assert world.client.task(foreign.id).status in ("allocated", "running")
    world.client.cancel(foreign.id)
