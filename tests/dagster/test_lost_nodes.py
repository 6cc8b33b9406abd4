"""A node that goes away takes neither a step nor a run with it, and costs no retry of the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess
from dagster import DagsterEventType
from dagster_world import World, a_home, a_node
from harness import start_scheduler, wait_until

from crater_core.client import CraterClient


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[str, AgentProcess]]]:
    """A world of its own, in which a node counts as lost after four seconds."""
    place = tmp_path_factory.mktemp("lost")
    with contextlib.ExitStack() as stack:
        scheduler = stack.enter_context(start_scheduler(place / "s", heartbeat_interval="1s", heartbeat_timeout="4s"))
        client = stack.enter_context(CraterClient(scheduler.url))
        agents: dict[str, AgentProcess] = {}
        for side in ("left", "right"):
            agents[f"n-{side}"] = a_node(place, scheduler.url, f"n-{side}", side, False)
            stack.callback(agents[f"n-{side}"].stop)
        wait_until(lambda: client.health().nodes_ready == 2, 30, "two nodes")
        yield stack.enter_context(World.open(a_home(place, scheduler.url, "dagster"), client)), agents


def _begin(world: World, mark: Path) -> str:
    run_id = world.launch("surviving", {"ops": {"lives_twice": {"config": {"mark": str(mark)}}}})
    wait_until(lambda: mark.exists() and mark.read_text().endswith("\n"), 60, "the step runs")
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
    wait_until(lambda: len((tmp_path / "mark").read_text().splitlines()) == 2, 60, "it runs again")
    lives = _end(world, run_id, tmp_path / "mark")
    agents[first].restart()
    second = world.task_of(run_id, "lives_twice")
    assert lives == [f"{first} 0", f"{second.node} 0"]
    assert second.node != first
    assert second.attempt == 2
    wait_until(lambda: world.client.health().nodes_ready == 2, 30, "two nodes again")


def test_a_run_worker_on_a_lost_node_goes_on_elsewhere_and_its_step_never_notices(
    nodes: tuple[World, dict[str, AgentProcess]], tmp_path: Path
):
    world, agents = nodes
    # Fill the run worker's node, so that the step is on the other one.
    run_id = _begin(world, tmp_path / "mark")
    worker, step = world.task_of(run_id, None), world.task_of(run_id, "lives_twice")
    agents[worker.node or ""].kill()
    wait_until(lambda: world.task_of(run_id, None).attempt == 2, 60, "the run worker starts again")
    if worker.node == step.node:
        wait_until(lambda: len((tmp_path / "mark").read_text().splitlines()) == 2, 60, "the step runs again")
    lives = _end(world, run_id, tmp_path / "mark")
    agents[worker.node or ""].restart()
    assert len(lives) == (2 if worker.node == step.node else 1)
    assert world.task_of(run_id, None).node != worker.node
