"""Programs through `PipesCraterClient`: their messages, output, ends and figures, on real nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from dagster import AssetKey
from dagster_world import World
from harness import PATIENCE_S, wait_until

from crater_core.model.units import show_bytes


def _config(op: str, mark: Path) -> dict[str, object]:
    return {"ops": {op: {"config": {"mark": str(mark)}}}}


def test_messages_output_and_figures_come_into_the_run_once(world: World):
    run_id = world.launch("telling")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    logged = [entry.user_message for entry in world.instance.all_logs(run_id)]
    assert [m for m in logged if m.startswith("message ")] == [f"message {n}" for n in range(300)]
    event = world.instance.get_latest_materialization_event(AssetKey("told"))
    assert event is not None
    assert event.asset_materialization is not None
    metadata = {name: value.value for name, value in event.asset_materialization.metadata.items()}
    assert metadata["length"] == 100
    pipes_task = world.task_of_role(run_id, "pipes")
    assert metadata["crater/task"] == pipes_task.id
    assert metadata["crater/link"].endswith(f"/#task={pipes_task.id}")
    assert metadata["crater/node"] == "n-left"
    assert metadata["crater/gpu_hours"] > 0
    assert metadata["crater/gb_hours"] == pytest.approx(pipes_task.gb_hours, rel=0.2)
    assert metadata["crater/core_hours"] == pytest.approx(pipes_task.core_hours, rel=0.2)
    assert metadata["crater/waited_s"] == pytest.approx(pipes_task.waited_ms / 1000)
    assert metadata["crater/ran_s"] == pytest.approx(pipes_task.ran_ms / 1000)
    assert "0.5 of it), simulated" in metadata["crater/devices"]
    assert pipes_task.memory_peak_bytes > 0
    assert metadata["crater/memory_peak"] == show_bytes(pipes_task.memory_peak_bytes)
    assert (pipes_task.project, pipes_task.priority) == ("vision", 61)
    stdout, stderr = world.captured(run_id)
    assert b"an ordinary line on stdout" in stdout
    assert b"half a line on stderr, and then " in stderr
    assert b"an ordinary line on stderr" in stderr
    assert b"__dagster_pipes_version" not in stderr


def test_a_context_of_any_size_reaches_the_program(world: World):
    run_id = world.launch("telling_much")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    event = world.instance.get_latest_materialization_event(AssetKey("told_much"))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["length"].value == 400_000


def test_a_program_that_fails_fails_the_step_with_the_reason(world: World):
    run_id = world.launch("pipes_exits_badly")
    assert world.finish(run_id) == "FAILURE"
    assert "ended with exit code 3" in world.failure(run_id)


def test_a_program_over_its_memory_fails_the_step_with_the_limit(world: World):
    run_id = world.launch("pipes_eats_much")
    assert world.finish(run_id) == "FAILURE"
    assert "limit 200 MiB" in world.failure(run_id)


def test_a_program_that_leaves_without_closing_pipes_fails_the_step(world: World):
    run_id = world.launch("pipes_leaves_early")
    assert world.finish(run_id) == "FAILURE"
    assert "without closing Dagster Pipes" in world.failure(run_id)


def test_a_program_without_pipes_fails_unless_it_is_said_to_be_one(world: World):
    refused, taken = world.launch("pipes_never_opens"), world.launch("pipes_is_plain")
    assert world.finish(refused) == "FAILURE"
    assert "never opened Dagster Pipes" in world.failure(refused)
    assert world.finish(taken) == "SUCCESS", world.story(taken)


def test_terminating_the_run_ends_the_program(world: World, tmp_path: Path):
    mark = tmp_path / "mark"
    run_id = world.launch("pipes_lasts", _config("lasts", mark))
    pid = int(wait_until(lambda: mark.exists() and mark.read_text(), PATIENCE_S, "the program runs"))
    assert world.instance.run_launcher.terminate(run_id) is True
    assert world.finish(run_id, 15) == "CANCELED"
    world.no_task_lives(run_id)
    assert not psutil.pid_exists(pid)


def test_a_run_worker_and_a_step_that_are_killed_find_the_program_again(world: World, tmp_path: Path):
    mark = tmp_path / "mark"
    run_id = world.launch("pipes_lasts", _config("lasts", mark))
    wait_until(lambda: mark.exists() and mark.read_text(), PATIENCE_S, "the program runs")
    os.kill(world.worker_pid(run_id, None), signal.SIGKILL)
    os.kill(world.worker_pid(run_id, "lasts"), signal.SIGKILL)
    wait_until(lambda: world.task_of(run_id, None).ended and world.task_of(run_id, "lasts").ended, 10, "both are gone")
    world.resume(run_id, 1)
    wait_until(lambda: any("Reattached" in text for text in world.log_texts(run_id)), PATIENCE_S, "the program is found again")
    mark.with_suffix(".end").touch()
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert len(mark.read_text().split()) == 1
