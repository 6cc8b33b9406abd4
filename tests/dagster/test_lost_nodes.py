"""A node that goes away, or is wanted for something else, takes neither a step nor a run with it, and costs no retry of the
user's; what cannot go on elsewhere says why it ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess
from dagster import DagsterEventType
from dagster_world import World, a_home, a_node
from harness import PATIENCE_S, start_scheduler, wait_until

from crater_core.client import CraterClient
from crater_dagster.reasons import FAILED_STEP_TAG, FAILURE_TAG


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, AgentProcess]]]:
    """A world of its own, in which a node counts as lost after four seconds and is given up after ten, and whoever runs may
    have to make room at once."""
    place = tmp_path_factory.mktemp("lost")
    with contextlib.ExitStack() as stack:
        silence = {"heartbeat_interval": "1s", "heartbeat_timeout": "4s", "node_forget_after": "10s"}
        scheduler = stack.enter_context(start_scheduler(place / "s", queue={"preempt_min_run": "0s"}, **silence))
        client = stack.enter_context(CraterClient(scheduler.url))
        agents: dict[str, AgentProcess] = {}
        for side in ("left", "right"):
            agents[f"n-{side}"] = a_node(place, scheduler.url, f"n-{side}", side, False)
            stack.callback(agents[f"n-{side}"].stop)
        wait_until(lambda: client.health().nodes_ready == 2, PATIENCE_S, "two nodes")
        yield stack.enter_context(World.open(a_home(place, scheduler.url, "dagster"), client)), agents


def _begin(world: World, mark: Path, job: str = "surviving", op: str = "lives_twice") -> str:
    run_id = world.launch(job, {"ops": {op: {"config": {"mark": str(mark)}}}})
    wait_until(lambda: mark.exists() and mark.read_text().endswith("\n"), PATIENCE_S, "the step runs")
    return run_id


def _end(world: World, run_id: str, mark: Path) -> list[str]:
    """Let the step end; gives the nodes and retry numbers of its lives."""
    mark.with_suffix(".end").touch()
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert world.events(run_id, DagsterEventType.STEP_UP_FOR_RETRY) == []
    return mark.read_text().splitlines()


def test_a_step_on_a_lost_node_runs_again_elsewhere_without_using_a_retry(
    nodes: tuple[World, dict[str, AgentProcess]], tmp_path: Path
):
    world, agents = nodes
    run_id = _begin(world, tmp_path / "mark")
    first = world.task_of(run_id, "lives_twice").node or ""
    agents[first].kill()
    wait_until(lambda: len((tmp_path / "mark").read_text().splitlines()) == 2, PATIENCE_S, "it runs again")
    lives = _end(world, run_id, tmp_path / "mark")
    agents[first].restart()
    second = world.task_of(run_id, "lives_twice")
    assert lives == [f"{first} 0", f"{second.node} 0"]
    assert second.node != first
    assert second.attempt == 2
    wait_until(lambda: world.client.health().nodes_ready == 2, PATIENCE_S, "two nodes again")


def test_a_run_worker_on_a_lost_node_goes_on_elsewhere_and_its_step_never_notices(
    nodes: tuple[World, dict[str, AgentProcess]], tmp_path: Path
):
    world, agents = nodes
    # Fill the run worker's node, so that the step is on the other one.
    run_id = _begin(world, tmp_path / "mark")
    worker, step = world.task_of(run_id, None), world.task_of(run_id, "lives_twice")
    agents[worker.node or ""].kill()
    wait_until(lambda: world.task_of(run_id, None).attempt == 2, PATIENCE_S, "the run worker starts again")
    if worker.node == step.node:
        wait_until(lambda: len((tmp_path / "mark").read_text().splitlines()) == 2, PATIENCE_S, "the step runs again")
    lives = _end(world, run_id, tmp_path / "mark")
    agents[worker.node or ""].restart()
    assert len(lives) == (2 if worker.node == step.node else 1)
    assert world.task_of(run_id, None).node != worker.node


def _take_the_node(world: World, name: str) -> str:
    """A more important task wants all of it; gives that task's id, when it has been there and gone."""
    all_of_it = world.client.node(name).allocatable
    wanted = world.client.submit(
        {
            "name": "important",
            "command": ["true"],
            "priority": 90,
            "strategy": "preemptive",
            "node_labels": {"side": name.removeprefix("n-")},
            "resources": {"cpu": all_of_it.cpu_milli / 1000, "memory": "64MiB"},
        }
    )
    assert world.client.wait(wanted.id, 60).status == "succeeded"
    return wanted.id


def test_a_preempted_step_runs_again_without_using_a_retry_and_says_for_whom_it_made_room(
    nodes: tuple[World, dict[str, AgentProcess]], tmp_path: Path
):
    world, _ = nodes
    run_id = _begin(world, tmp_path / "mark")
    first = world.task_of(run_id, "lives_twice").node or ""
    by = _take_the_node(world, first)
    wait_until(lambda: len((tmp_path / "mark").read_text().splitlines()) == 2, PATIENCE_S, "it runs again")
    lives = _end(world, run_id, tmp_path / "mark")
    task = world.task_of(run_id, "lives_twice")
    assert lives == [f"{first} 0", f"{task.node} 0"]
    assert task.attempt == 2
    said = [text for text in world.messages(run_id) if "was stopped and is queued again" in text]
    assert len(said) == 1, world.story(run_id)
    assert f"made room for {by}" in said[0]
    assert FAILURE_TAG not in world.run(run_id).tags


def test_a_preempted_run_in_one_process_fails_with_the_reason_that_run_retries_and_sensors_read(
    nodes: tuple[World, dict[str, AgentProcess]], tmp_path: Path
):
    world, _ = nodes
    run_id = _begin(world, tmp_path / "mark", "surviving_in_one_process")
    by = _take_the_node(world, world.task_of(run_id, None).node or "")
    assert world.finish(run_id) == "FAILURE"
    (event,) = world.events(run_id, DagsterEventType.RUN_FAILURE)
    assert f"made room for {by}" in (event.message or "")
    assert world.run(run_id).tags[FAILURE_TAG] == "preempted"
    assert len((tmp_path / "mark").read_text().splitlines()) == 1
    world.no_task_lives(run_id)


def test_a_step_that_may_not_run_elsewhere_fails_when_its_node_is_given_up(
    nodes: tuple[World, dict[str, AgentProcess]], tmp_path: Path
):
    world, agents = nodes
    run_id = _begin(world, tmp_path / "mark", "staying", "stays_where_it_is")
    node = (tmp_path / "mark").read_text().strip()
    agents[node].kill()
    assert world.finish(run_id, 90) == "FAILURE"
    agents[node].restart()
    assert f"The node {node} has not been heard from for" in world.failure(run_id)
    assert world.run(run_id).tags[FAILURE_TAG] == "node_lost"
    assert world.run(run_id).tags[FAILED_STEP_TAG] == "stays_where_it_is"
    wait_until(lambda: world.client.health().nodes_ready == 2, PATIENCE_S, "two nodes again")
