"""A run that is terminated ends with all of its tasks, whatever they were about at that moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from dagster import DagsterEventType
from dagster_world import World
from harness import PATIENCE_S, wait_until


@pytest.mark.parametrize("moment", ["asked for", "being started"])
def test_a_step_that_is_just_being_started_ends_with_its_run(world: World, tmp_path: Path, moment: str):
    """A cold worker takes seconds until its step begins."""
    config = {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}}
    run_id = world.launch("sleeping", config, {"crater/warm": "off"})
    if moment == "asked for":
        wait_until(lambda: world.events(run_id, DagsterEventType.STEP_WORKER_STARTING), PATIENCE_S, "the step is asked for")
    else:
        wait_until(lambda: world.task_once(run_id, "sleeps").status == "running", PATIENCE_S, "its worker is being started")
    assert not (tmp_path / "pid").exists()
    assert world.launcher.terminate(run_id) is True
    assert world.finish(run_id, 30) == "CANCELED", world.story(run_id)
    world.no_task_lives(run_id)
    assert not world.events(run_id, DagsterEventType.STEP_SUCCESS)
    assert all(task.status == "cancelled" for task in world.tasks(run_id) if task.labels["crater/role"] == "step")


def test_every_step_of_a_terminated_run_is_told_to_stop(rules_world: World, tmp_path: Path):
    world = rules_world
    run_id = world.launch("holding", tags={"gate": str(tmp_path / "never")})
    wait_until(lambda: len(world.events(run_id, DagsterEventType.STEP_START)) >= 2, PATIENCE_S, "two steps run")
    assert world.launcher.terminate(run_id) is True
    assert world.finish(run_id, 30) == "CANCELED", world.story(run_id)
    world.no_task_lives(run_id)
    steps = {task.labels["dagster/step_key"]: task.status for task in world.tasks(run_id) if task.labels["crater/role"] == "step"}
    assert steps == dict.fromkeys(("a", "b", "c", "d"), "cancelled")


def test_a_step_that_was_submitted_while_its_run_was_being_terminated_ends_too(world: World, tmp_path: Path):
    """Its run worker hangs, and is killed after its grace; what it had sent by then reaches the scheduler after the others
    were told to stop."""
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}})
    wait_until((tmp_path / "pid").exists, PATIENCE_S, "the step runs")
    os.kill(world.worker_pid(run_id, None), signal.SIGSTOP)
    assert world.launcher.terminate(run_id) is True
    late = {"name": "late", "command": ["sleep", "600"], "group": f"dagster-run:{run_id}", "resources": {"memory": "64MiB"}}
    late_id = world.client.submit(late).id
    assert world.finish(run_id, 30) == "CANCELED", world.story(run_id)
    ended = world.client.wait(late_id, 30)
    assert (ended.status, ended.reason and ended.reason.code) == ("cancelled", "cancelled")
    world.no_task_lives(run_id)
