"""The launcher's contract with Dagster: what it puts on the wire, says of a run, and does when nobody answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dagster import DagsterInvalidConfigError, DagsterRunStatus
from dagster_world import World, a_home
from harness import PATIENCE_S, SchedulerProcess, wait_until

from crater_core.errors import CraterError
from crater_dagster import CraterRunLauncher
from crater_dagster._dagster import LaunchRunContext
from crater_dagster.config import code_location_options
from crater_dagster.payload import unpack

CONSTRUCTS = """
import json, socket, sys, threading
from pathlib import Path
import dagster as dg
sockets, made = [], socket.socket.__init__
def counted(self, *args, **options):
    sockets.append(args)
    made(self, *args, **options)
socket.socket.__init__ = counted
before = threading.active_count()
with dg.DagsterInstance.from_config(sys.argv[1]) as instance:
    launcher = instance.run_launcher
    answers = [launcher.supports_resume_run, launcher.supports_check_run_worker_health, launcher.client().endpoints]
    threads = [thread.name for thread in threading.enumerate()][before:]
    print(json.dumps([type(launcher).__name__, answers, threads, len(sockets), sorted(sys.modules)]))
"""


def test_constructing_it_asks_nobody_and_starts_nothing(tmp_path: Path):
    """Dagster's web server, daemon, code servers and every step construct it: in a process of its own, with a scheduler that
    would see a connection."""
    with socket.socket() as scheduler:
        scheduler.bind(("127.0.0.1", 0))
        scheduler.listen()
        scheduler.setblocking(False)
        url = f"http://127.0.0.1:{scheduler.getsockname()[1]}"
        home = a_home(tmp_path, url, "dagster", run_monitoring={"enabled": True, "max_resume_run_attempts": 2})
        command = [sys.executable, "-c", CONSTRUCTS, str(home)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        name, answers, threads, sockets, modules = json.loads(done.stdout)
        assert (name, answers) == ("CraterRunLauncher", [True, True, [url]])
        assert (threads, sockets) == ([], 0)
        with pytest.raises(BlockingIOError):
            scheduler.accept()
    assert not {"docker", "torch", "numpy", "pynvml", "uvicorn", "fastapi", "crater_core.service", "crater_agent"} & set(modules)


def test_a_submission_carries_the_run_and_no_settings_of_the_instance(world: World):
    run_id = world.launch("failing")
    task = world.task_of(run_id, None)
    assert task.command[1:] == ["-m", "crater_dagster.worker", "run"]
    spec = world.launcher._worker_task(world.run(run_id), 0)
    assert unpack(spec.env) == {"run_id": run_id, "resume": False}
    step = world.task_once(run_id, "fails")
    assert str(world.place) not in json.dumps(step.model_dump())
    world.finish(run_id)


def test_links_lead_to_the_console_that_people_open(world: World, scheduler: SchedulerProcess):
    run = world.create("in_one_process")
    launcher = CraterRunLauncher(endpoint=scheduler.url, env_profile="dagster", console_url="https://crater.example/")
    launcher.register_instance(world.instance)
    launcher.launch_run(LaunchRunContext(run, None))
    try:
        assert world.finish(run.run_id) == "SUCCESS", world.story(run.run_id)
        task = world.task_of(run.run_id, None)
        (told,) = [event for event in world.events(run.run_id) if f"Run worker is task {task.id}" in (event.message or "")]
        assert told.engine_event_data.metadata["crater/link"].value == f"https://crater.example/#task={task.id}"
    finally:
        launcher.dispose()


def test_a_run_worker_that_waits_says_why_once_and_can_be_terminated(world: World):
    """A node label that no node has keeps it waiting."""
    run_id = world.launch("failing", tags={"crater/node_labels": '{"side": "nowhere"}'})
    wait_until(lambda: any("has the labels" in message for message in world.messages(run_id)), 10, "the reason is told")
    health = world.launcher.check_run_worker_health(world.run(run_id))
    assert health.status.value == "RUNNING"
    assert "has the labels" in (health.msg or "")
    assert world.launcher.terminate(run_id) is True
    assert world.finish(run_id, 5) == "CANCELED"
    assert sum("has the labels" in message for message in world.messages(run_id)) == 1


def test_a_step_that_waits_says_why_with_the_next_step_to_take(world: World):
    run_id = world.launch("waiting")
    wait_until(
        lambda: any("waits: No ready node has the labels" in text for text in world.messages(run_id)), PATIENCE_S, "the reason"
    )
    assert any("label a node in its agent.yaml" in text for text in world.messages(run_id))
    assert world.launcher.terminate(run_id) is True
    assert world.finish(run_id, 15) == "CANCELED"
    world.no_task_lives(run_id)


def test_a_request_that_cannot_be_fails_the_launch_with_the_field(world: World):
    run = world.create("failing", tags={"crater/priority": "very"})
    with pytest.raises(CraterError, match="crater/priority must be a whole number"):
        world.instance.launch_run(run.run_id, world.workspace.create_request_context())
    assert world.run(run.run_id).status is DagsterRunStatus.FAILURE


def test_the_code_locations_options_are_checked(world: World):
    run = world.create("failing")
    origin = run.job_code_origin
    assert origin is not None
    context = {"crater": {"projekt": "a"}}
    wrong = origin._replace(repository_origin=origin.repository_origin._replace(container_context=context))
    with pytest.raises(DagsterInvalidConfigError):
        code_location_options(run._replace(job_code_origin=wrong))
    right = origin.repository_origin._replace(container_context={"crater": {"project": "a"}}, container_image="img:1")
    found = code_location_options(run._replace(job_code_origin=origin._replace(repository_origin=right)))
    assert found == {"image": "img:1", "project": "a"}


def test_a_run_that_was_never_launched_has_no_worker(world: World):
    run = world.create("failing")
    health = world.launcher.check_run_worker_health(run)
    assert health.status.value == "NOT_FOUND"
    assert world.launcher.get_run_worker_debug_info(run) == health.msg


def test_a_scheduler_that_is_away_reads_as_running_for_a_bounded_time(world: World, scheduler: SchedulerProcess, tmp_path: Path):
    run = world.create("failing")
    launcher = CraterRunLauncher(endpoint=scheduler.url, unreachable_grace="1s")
    launcher.register_instance(world.instance)
    scheduler.kill()
    try:
        health = launcher.check_run_worker_health(run)
        assert health.status.value == "RUNNING"
        assert "no scheduler answered" in (health.msg or "")
        health = wait_until(lambda: _if_failed(launcher.check_run_worker_health(run)), 10, "the grace is over")
        assert "longer than unreachable_grace" in health.msg
        assert "could not be asked" in (launcher.get_run_worker_debug_info(run) or "")
    finally:
        scheduler.start()
    assert launcher.check_run_worker_health(run).status.value == "NOT_FOUND"
    launcher.dispose()


def _if_failed(health):
    return health if health.status.value == "FAILED" else None
