"""Ends that come at an odd moment: after a step's success, before a run's end, or before the work was begun at all."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dagster import DagsterEventType
from dagster_world import World
from harness import PATIENCE_S, SchedulerProcess, wait_until

from crater_core.wire.tasks import TaskView
from crater_dagster import CraterRunLauncher
from crater_dagster._dagster import ExecuteStepArgs, LaunchRunContext
from crater_dagster.executor import CraterStepHandler
from crater_dagster.reasons import FAILURE_TAG


@pytest.mark.parametrize(("how", "code"), [("exit", "exit_code"), ("signal", "signalled")])
def test_a_step_whose_process_fails_after_its_success_was_written_stays_a_success(
    world: World, tmp_path: Path, how: str, code: str
):
    """Its run goes on for as long as its process's end is known, and a run worker that takes over asks about it again."""
    gate = tmp_path / "gate"
    ops = {"succeeds_then_dies": {"config": {"how": how}}, "waits_for_a_file": {"config": {"wait_for": str(gate)}}}
    run_id = world.launch("dying_late", {"ops": ops})
    task = wait_until(lambda: _if_ended(world.task_once(run_id, "succeeds_then_dies")), PATIENCE_S, "its process has ended")
    assert (task.status, task.reason and task.reason.code) == ("failed", code)
    wait_until(lambda: _if_ended(world.task_once(run_id, "after")), PATIENCE_S, "the step that needs it has ended")
    os.kill(world.worker_pid(run_id, None), signal.SIGKILL)
    wait_until(lambda: world.task_of(run_id, None).ended, 10, "the run worker's end is known")
    world.resume(run_id, 1)
    gate.touch()
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert not world.events(run_id, DagsterEventType.STEP_FAILURE)
    assert len(world.events(run_id, DagsterEventType.STEP_SUCCESS)) == 3
    assert FAILURE_TAG not in world.run(run_id).tags


def test_asked_about_a_step_that_has_succeeded_the_executor_never_says_it_failed(world: World, tmp_path: Path):
    (tmp_path / "gate").touch()
    ops = {"succeeds_then_dies": {"config": {"how": "exit"}}, "waits_for_a_file": {"config": {"wait_for": f"{tmp_path}/gate"}}}
    run_id = world.launch("dying_late", {"ops": ops})
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    wait_until(lambda: world.task_of(run_id, "succeeds_then_dies").ended, 10, "its process has ended")
    run = world.run(run_id)
    asked = ExecuteStepArgs(run.job_code_origin, run_id, ["succeeds_then_dies"])
    handler = CraterStepHandler({})
    handler.begin(world.instance, run, resumed=True)
    try:
        assert handler.check_step_health(SimpleNamespace(execute_step_args=asked)).is_healthy
    finally:
        handler.finish()


def _if_ended(task: TaskView) -> TaskView | None:
    return task if task.ended else None


def test_a_run_worker_that_leaves_with_exit_code_0_before_its_run_has_ended_fails_it(logging_world: World):
    run_id = logging_world.launch("silent_in_one_process")
    assert logging_world.finish(run_id, 30) == "FAILURE", logging_world.story(run_id)
    (event,) = logging_world.events(run_id, DagsterEventType.RUN_FAILURE)
    assert "The run worker has left without finishing its run" in (event.message or "")
    assert "exit code 0" in (event.message or "")
    assert logging_world.run(run_id).tags[FAILURE_TAG] == "no_end"


def test_a_run_worker_that_left_with_exit_code_0_is_failed_to_run_monitoring(world: World):
    run_id = world.launch("silent_in_one_process")
    wait_until(lambda: world.task_of(run_id, None).ended, PATIENCE_S, "the worker has left")
    assert world.task_of(run_id, None).status == "succeeded"
    health = world.launcher.check_run_worker_health(world.run(run_id))
    assert world.run(run_id).status.value == "STARTED"
    assert health.status.value == "FAILED"
    assert "without finishing its run" in (health.msg or "")
    assert world.launcher.terminate(run_id) is True
    assert world.finish(run_id, 10) == "CANCELED"


@contextlib.contextmanager
def _nodes_that_take_nothing(world: World) -> Iterator[None]:
    for node in world.client.nodes():
        world.client.cordon(node.name)
    try:
        yield
    finally:
        for node in world.client.nodes():
            world.client.uncordon(node.name)


def test_a_run_worker_that_starts_after_its_run_is_over_starts_nothing_and_ends_cleanly(
    world: World, scheduler: SchedulerProcess
):
    """As after Dagster's start time-out, which fails the run and leaves its worker in the queue; who launched it has gone."""
    run = world.create("loop")
    run_id = run.run_id
    launcher = CraterRunLauncher(endpoint=scheduler.url, env_profile="dagster")
    launcher.register_instance(world.instance)
    with _nodes_that_take_nothing(world):
        launcher.launch_run(LaunchRunContext(run, None))
        wait_until(lambda: any("run worker waits" in text for text in world.messages(run_id)), 10, "it waits")
        launcher.dispose()
        world.instance.report_run_failed(world.run(run_id), "it was not started in time")
    task = wait_until(lambda: _if_ended(world.task_of(run_id, None)), PATIENCE_S, "the worker has ended")
    assert task.status == "succeeded", world.story(run_id)
    assert b"is over (FAILURE)" in world.client.logs(task.id, "stderr").data
    assert [task.labels["crater/role"] for task in world.tasks(run_id)] == ["run"]
    assert world.run(run_id).status.value == "FAILURE"
    assert not world.events(run_id, DagsterEventType.RUN_START)


def test_a_step_that_starts_after_its_run_is_over_does_not_begin(world: World, tmp_path: Path):
    gate = tmp_path / "gate"
    run_id = world.launch("interrupted", {"ops": {"waits_for_a_file": {"config": {"wait_for": str(gate)}}}})
    wait_until(lambda: world.events(run_id, DagsterEventType.STEP_START), PATIENCE_S, "the first step has started")
    with _nodes_that_take_nothing(world):
        gate.touch()
        world.task_once(run_id, "after")
        # As a person does who marks it as canceled at once.
        world.instance.report_run_canceled(world.run(run_id))
    task = wait_until(lambda: _if_ended(world.task_of(run_id, "after")), PATIENCE_S, "the step's task has ended")
    assert b"is over (CANCELED)" in world.client.logs(task.id, "stderr").data
    assert [event.step_key for event in world.events(run_id, DagsterEventType.STEP_START)] == ["waits_for_a_file"]
    assert world.run(run_id).status.value == "CANCELED"
    world.no_task_lives(run_id)
