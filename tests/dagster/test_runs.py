"""Runs through the launcher and the executor, on real agents: what succeeds, fails, is ended, and what Dagster is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from dagster import AssetKey, DagsterEventType
from dagster_world import World
from harness import PATIENCE_S, SchedulerProcess, wait_until

from crater_dagster.reasons import FAILURE_TAG


def test_a_run_succeeds_with_steps_on_two_nodes(world: World):
    run_id = world.launch("loop")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert world.task_of(run_id, "left").node == "n-left"
    assert world.task_of(run_id, "right").node == "n-right"
    assert world.task_of(run_id, None).type == "control"


def test_each_materialization_says_where_it_ran_and_what_it_cost(world: World):
    run_id = world.launch("loop")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    both = world.instance.get_latest_materialization_event(AssetKey("both"))
    assert both is not None
    assert both.asset_materialization is not None
    metadata = {name: value.value for name, value in both.asset_materialization.metadata.items()}
    assert metadata["crater/node"] == "n-left"
    assert "0.25 of it), simulated" in metadata["crater/devices"]
    assert metadata["crater/task"] == world.task_of(run_id, "both").id
    assert metadata["crater/link"] == f"{world.client.endpoints[0]}/#task={metadata['crater/task']}"
    assert metadata["crater/core_hours"] > 0
    assert metadata["crater/gpu_hours"] > 0
    assert metadata["crater/ran_s"] > 0
    assert {name for name in metadata if name.startswith("crater/")} >= {
        "crater/node",
        "crater/devices",
        "crater/task",
        "crater/waited_s",
        "crater/ran_s",
        "crater/gpu_hours",
        "crater/core_hours",
        "crater/gb_hours",
    }
    assert metadata["crater/gb_hours"] > 0
    assert metadata["crater/waited_s"] >= 0
    right = world.instance.get_latest_materialization_event(AssetKey("right"))
    assert right is not None
    assert right.asset_materialization is not None
    assert right.asset_materialization.metadata["own"].value == 7
    assert right.asset_materialization.metadata["crater/node"].value == "n-right"


def test_a_step_that_fails_has_its_own_error_in_the_log(world: World):
    run_id = world.launch("failing")
    assert world.finish(run_id) == "FAILURE"
    assert "the data were not as promised" in world.failure(run_id)
    assert world.task_of(run_id, "fails").exit_code == 1


def test_a_step_is_retried_as_its_retry_policy_says(world: World):
    run_id = world.launch("retried")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    tasks = [task for task in world.tasks(run_id) if task.labels.get("dagster/step_key") == "fails_once"]
    assert sorted(task.labels["dagster/retry"] for task in tasks) == ["0", "1"]


def test_dynamic_outputs_fan_out_and_are_collected(world: World):
    run_id = world.launch("spreading")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert world.task_of(run_id, "doubles[n2]").status == "succeeded"


def test_a_run_marked_compute_runs_in_one_process_with_its_own_request(world: World):
    run_id = world.launch("in_one_process")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    (task,) = world.tasks(run_id)
    assert task.type == "batch"
    assert task.requested.cpu_milli == 500


def test_a_step_over_its_memory_fails_with_limit_and_peak(world: World):
    run_id = world.launch("hungry")
    assert world.finish(run_id) == "FAILURE"
    failure = world.failure(run_id)
    assert "more memory than its limit: limit 300 MiB" in failure
    assert "peak" in failure or "seen" in failure
    assert world.run(run_id).tags["crater/failure_reason"] == "oom"
    assert world.run(run_id).tags["crater/failed_step"] == "eats"


def test_a_step_that_runs_out_of_memory_runs_again_with_more_without_using_a_retry(world: World):
    run_id = world.launch("growing")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    task = world.task_of(run_id, "eats_some")
    assert (task.attempt, task.members, task.requested.memory_bytes) == (2, 1, 600 * 1024**2)
    assert not world.events(run_id, DagsterEventType.STEP_UP_FOR_RETRY)


def test_a_step_over_its_time_fails_with_the_limit(world: World):
    run_id = world.launch("slow")
    assert world.finish(run_id) == "FAILURE"
    assert "time limit of 3 s" in world.failure(run_id)
    assert world.run(run_id).tags["crater/failure_reason"] == "time_limit"


def test_a_run_in_one_process_over_its_time_fails_with_the_limit(logging_world: World):
    run_id = logging_world.launch("slow_in_one_process")
    assert logging_world.finish(run_id) == "FAILURE", logging_world.story(run_id)
    (event,) = logging_world.events(run_id, DagsterEventType.RUN_FAILURE)
    assert "time limit of 6 s" in (event.message or "")
    assert logging_world.run(run_id).tags["crater/failure_reason"] == "time_limit"


def test_a_step_that_ends_without_a_final_event_fails_instead_of_hanging(world: World):
    run_id = world.launch("silent")
    assert world.finish(run_id) == "FAILURE"
    assert "without saying how the step ended" in world.failure(run_id)
    assert world.run(run_id).tags[FAILURE_TAG] == "no_end"


def test_a_step_that_is_killed_fails_with_the_signal_and_its_last_lines(world: World):
    run_id = world.launch("killed")
    assert world.finish(run_id) == "FAILURE"
    assert "signal" in world.failure(run_id)
    told = [line for line in world.failure(run_id).splitlines() if "of its output" in line]
    assert told == [f"line {number} of its output" for number in range(250, 300)]


def test_a_request_no_node_could_ever_meet_fails_the_step_with_the_numbers(world: World):
    run_id = world.launch("impossible")
    assert world.finish(run_id) == "FAILURE"
    assert "No node could ever run this" in world.failure(run_id)
    assert "largest node" in world.failure(run_id)


def test_terminating_a_run_ends_its_whole_tree(world: World, tmp_path: Path):
    mark = tmp_path / "pid"
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(mark)}}}})
    pid = int(wait_until(lambda: mark.exists() and mark.read_text(), PATIENCE_S, "the step runs"))
    assert world.instance.run_launcher.terminate(run_id) is True
    assert world.finish(run_id, 10) == "CANCELED"
    assert not any("Unexpected exception" in message for message in world.messages(run_id)), world.story(run_id)
    world.no_task_lives(run_id)
    wait_until(lambda: not psutil.pid_exists(pid), 5, "the step's process gone")
    assert world.instance.run_launcher.terminate(run_id) is False


def test_a_run_finishes_although_the_scheduler_was_killed_in_the_middle(
    world: World, scheduler: SchedulerProcess, tmp_path: Path
):
    gate = tmp_path / "gate"
    run_id = world.launch("interrupted", {"ops": {"waits_for_a_file": {"config": {"wait_for": str(gate)}}}})
    wait_until(lambda: world.events(run_id, DagsterEventType.STEP_START), PATIENCE_S, "the first step started")
    scheduler.kill()
    gate.touch()
    wait_until(lambda: world.events(run_id, DagsterEventType.STEP_SUCCESS), 15, "the first step ended meanwhile")
    wait_until(lambda: any("No scheduler answers" in message for message in world.messages(run_id)), 15, "it is told")
    scheduler.start()
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert any("answers again" in message for message in world.messages(run_id))


def test_a_killed_run_worker_is_failed_to_run_monitoring_with_the_reason(world: World, tmp_path: Path):
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}})
    wait_until((tmp_path / "pid").exists, PATIENCE_S, "the step runs")
    assert world.launcher.check_run_worker_health(world.run(run_id)).status.value == "RUNNING"
    os.kill(world.worker_pid(run_id, None), signal.SIGKILL)
    wait_until(lambda: world.task_of(run_id, None).ended, 10, "the worker's end is known")
    health = world.launcher.check_run_worker_health(world.run(run_id))
    assert health.status.value == "FAILED"
    assert "without finishing its run" in (health.msg or "")
    assert "signal" in (health.msg or "")
    debug = world.launcher.get_run_worker_debug_info(world.run(run_id))
    assert debug is not None
    assert "allocated" in debug
    assert not world.task_of(run_id, "sleeps").ended
    assert world.launcher.terminate(run_id) is True
    assert world.finish(run_id, 10) == "CANCELED"
    world.no_task_lives(run_id)


def test_a_resumed_run_worker_finds_its_step_still_running(world: World, tmp_path: Path):
    mark = tmp_path / "mark"
    run_id = world.launch("surviving", {"ops": {"lives_twice": {"config": {"mark": str(mark)}}}})
    wait_until(lambda: mark.exists() and mark.read_text(), PATIENCE_S, "the step runs")
    os.kill(world.worker_pid(run_id, None), signal.SIGKILL)
    wait_until(lambda: world.task_of(run_id, None).ended, 10, "the worker's end is known")
    world.resume(run_id, 1)
    mark.with_suffix(".end").touch()
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert len(mark.read_text().splitlines()) == 1


def test_without_resume_a_killed_run_worker_fails_its_run_at_once_and_ends_its_steps(logging_world: World, tmp_path: Path):
    world = logging_world
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}})
    wait_until((tmp_path / "pid").exists, PATIENCE_S, "the step runs")
    os.kill(world.worker_pid(run_id, None), signal.SIGKILL)
    assert world.finish(run_id, 15) == "FAILURE"
    assert world.run(run_id).tags["crater/failure_reason"] == "signalled"
    world.no_task_lives(run_id)


def test_a_run_worker_that_cannot_be_started_fails_its_run_with_the_reason(world: World):
    run_id = world.launch("failing", tags={"crater/python": "no-such-python"})
    assert world.finish(run_id, 30) == "FAILURE"
    (event,) = world.events(run_id, DagsterEventType.RUN_FAILURE)
    assert "no-such-python was not found" in (event.message or "")
    assert world.run(run_id).tags["crater/failure_reason"] == "start_failed"


def test_a_run_worker_that_a_person_cancels_ends_its_run_as_canceled_with_the_name(world: World, tmp_path: Path):
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}})
    wait_until((tmp_path / "pid").exists, PATIENCE_S, "the step runs")
    world.client.cancel(world.task_of(run_id, None).id, "no longer wanted")
    assert world.finish(run_id, 20) == "CANCELED", world.story(run_id)
    assert any("cancelled by local: no longer wanted" in (event.message or "") for event in world.events(run_id))
    assert "crater/failure_reason" not in world.run(run_id).tags
    world.no_task_lives(run_id)


def test_a_run_in_one_process_that_a_person_cancels_is_canceled(world: World, tmp_path: Path):
    mark = tmp_path / "pid"
    run_id = world.launch("sleeping_in_one_process", {"ops": {"sleeps": {"config": {"mark": str(mark)}}}})
    wait_until(mark.exists, PATIENCE_S, "the step runs")
    world.client.cancel(world.task_of(run_id, None).id, "no longer wanted")
    assert world.finish(run_id, 20) == "CANCELED", world.story(run_id)
    assert any("cancelled by local: no longer wanted" in (event.message or "") for event in world.events(run_id))


def test_a_cancelled_run_worker_that_could_write_no_end_is_neither_resumed_nor_failed(world: World, tmp_path: Path):
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}})
    wait_until((tmp_path / "pid").exists, PATIENCE_S, "the step runs")
    os.kill(world.worker_pid(run_id, None), signal.SIGSTOP)
    world.client.cancel(world.task_of(run_id, None).id, "no longer wanted")
    wait_until(lambda: world.task_of(run_id, None).ended, PATIENCE_S, "it is killed after its grace")
    assert world.launcher.check_run_worker_health(world.run(run_id)).status.value == "SUCCESS"
    assert world.run(run_id).status.value == "CANCELED", world.story(run_id)
    world.no_task_lives(run_id)


def test_a_step_task_that_a_person_cancels_fails_its_step_with_the_name(world: World, tmp_path: Path):
    run_id = world.launch("sleeping", {"ops": {"sleeps": {"config": {"mark": str(tmp_path / "pid")}}}})
    wait_until((tmp_path / "pid").exists, PATIENCE_S, "the step runs")
    world.client.cancel(world.task_of(run_id, "sleeps").id, "no longer wanted")
    assert world.finish(run_id, 20) == "FAILURE", world.story(run_id)
    assert "It was cancelled by local: no longer wanted" in world.failure(run_id)
    assert world.run(run_id).tags["crater/failure_reason"] == "cancelled"
