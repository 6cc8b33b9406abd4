"""Two code locations behind one web server and one daemon: each has its own options, and what fails can be begun anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dagster import DagsterRun, RunsFilter
from dagster_service import END_AT_ONCE, Dagster, a_code_server, a_dagster
from dagster_world import World
from harness import PATIENCE_S, free_port, wait_until

from crater_core.wire.tasks import TaskView
from crater_dagster import crater_tags
from crater_dagster.reasons import FAILED_STEP_TAG, FAILURE_TAG

MIB = 1024**2
IMAGES = {"maps": "maps-pipelines:7", "texts": "registry.example/texts:2"}


@pytest.fixture(scope="module")
def dagster(rules_world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dagster]:
    place = tmp_path_factory.mktemp("locations")
    contexts = {
        "vision": {"project": "vision", "labels": rules_world.code.labels_from("location")},
        "speech": {"project": "speech", "resources": {"memory": "330MiB"}},
        **{name: {"project": name, "python": "/usr/bin/python3"} for name in IMAGES},
    }
    with contextlib.ExitStack() as stack:
        servers = []
        for name, context in contexts.items():
            port = free_port()
            image = ("--container-image", IMAGES[name]) if name in IMAGES else ()
            stack.enter_context(a_code_server(rules_world.file, place / f"{name}.log", port, context, *image))
            servers.append({"grpc_server": {"host": "127.0.0.1", "port": port, "location_name": name}})
        workspace = place / "workspace.yaml"
        workspace.write_text(yaml.safe_dump({"load_from": servers}))
        yield stack.enter_context(a_dagster(rules_world, "rules", workspace))


def _end(dagster: Dagster, run_id: str) -> str:
    wait_until(lambda: dagster.status(run_id) in ("SUCCESS", "FAILURE", "CANCELED"), PATIENCE_S, "the run has ended")
    return dagster.status(run_id)


def _steps(world: World, run_id: str) -> dict[str, TaskView]:
    return {task.labels["dagster/step_key"]: task for task in world.tasks(run_id) if task.labels["crater/role"] == "step"}


def test_of_all_layers_of_options_the_higher_one_wins_in_a_real_run(dagster: Dagster):
    world = dagster.world
    labels_from, layers = world.code.labels_from, world.code.LAYERS
    executor = {
        "labels": labels_from("executor"),
        "resources": {"cpu": 0.3},
        "per_step": {"asks_in_every_layer": {"labels": labels_from("per_step"), "resources": {"cpu": 0.4}}},
    }
    tags = crater_tags(labels=labels_from("run"))
    run_id = dagster.launch("layered", "vision", run_config={"execution": {"config": executor}}, tags=tags)
    assert _end(dagster, run_id) == "SUCCESS", world.story(run_id)
    steps = _steps(world, run_id)
    told = {step: [task.labels[f"set-by-{name}-or-below"] for name in layers] for step, task in steps.items()}
    assert told["asks_in_every_layer"] == list(layers)
    assert told["asks_for_nothing"] == ["launcher", "location", "executor", "run", "run", "run"]
    asked = {step: (task.requested.cpu_milli, task.requested.memory_bytes // MIB) for step, task in steps.items()}
    assert asked == {"asks_in_every_layer": (400, 310), "asks_for_nothing": (300, 320)}
    assert {task.project for task in world.tasks(run_id)} == {"vision"}


def test_assets_launched_from_the_graph_ask_for_what_their_op_tags_and_their_location_say(dagster: Dagster):
    world = dagster.world
    run_id = dagster.launch("__ASSET_JOB", "speech", assets=["from_the_graph", "next_of_it"])
    assert _end(dagster, run_id) == "SUCCESS", world.story(run_id)
    steps = _steps(world, run_id)
    asked = {step: (task.labels["asked-by"], task.requested.cpu_milli, task.project) for step, task in steps.items()}
    assert asked == {"from_the_graph": ("the asset", 200, "speech"), "next_of_it": ("the next asset", 300, "speech")}


def test_another_locations_options_are_another_locations(dagster: Dagster):
    world = dagster.world
    run_id = dagster.launch("layered", "speech")
    assert _end(dagster, run_id) == "SUCCESS", world.story(run_id)
    steps = _steps(world, run_id)
    assert steps["asks_for_nothing"].requested.memory_bytes == 330 * MIB
    assert steps["asks_for_nothing"].labels["set-by-location-or-below"] == "launcher"
    assert {task.project for task in world.tasks(run_id)} == {"speech"}


def test_two_locations_with_an_image_each_have_their_runs_ask_for_their_own_image(dagster: Dagster):
    """These nodes run no containers, so the run workers wait, and say for what. (That containers run is for test_images.py.)"""
    world = dagster.world
    for location, image in IMAGES.items():
        run_id = dagster.launch("holding", location, tags={"gate": "/nowhere"})
        waits = lambda run_id=run_id: [text for text in world.messages(run_id) if "The run worker waits" in text]  # noqa: E731
        (told,) = wait_until(waits, PATIENCE_S, "its run worker waits")
        assert "a node that runs docker tasks" in told
        worker = world.task_of(run_id, None)
        assert (worker.image, worker.project, worker.command[0]) == (image, location, "/usr/bin/python3")
        # Dagster's page offers nothing gentler for a run that has not started.
        assert dagster.ask(END_AT_ONCE, run=run_id)["terminateRun"]["__typename"] == "TerminateRunSuccess"
        assert _end(dagster, run_id) == "CANCELED"
        world.no_task_lives(run_id, 30)
        assert world.task_of(run_id, None).status == "cancelled"


def _made_from(world: World, parent: str) -> DagsterRun | None:
    found = world.instance.get_runs(RunsFilter(tags={"dagster/parent_run_id": parent}))
    return found[0] if found else None


def test_a_failed_run_is_begun_anew_by_run_retries_from_where_it_failed(dagster: Dagster, tmp_path: Path):
    world = dagster.world
    marks = tmp_path / "marks"
    parent = dagster.launch("late_in_the_first_run", "vision", tags={"marks": str(marks), "dagster/max_retries": "1"})
    assert _end(dagster, parent) == "FAILURE", world.story(parent)
    again = wait_until(lambda: _made_from(world, parent), PATIENCE_S, "the daemon has begun it anew").run_id
    assert _end(dagster, again) == "SUCCESS", world.story(again)
    _check_the_second_half(world, parent, again, marks)
    assert world.run(again).tags["dagster/retry_number"] == "1"


def test_a_failed_run_is_begun_anew_by_a_person_from_where_it_failed(dagster: Dagster, tmp_path: Path):
    world = dagster.world
    marks = tmp_path / "marks"
    parent = dagster.launch("late_in_the_first_run", "vision", tags={"marks": str(marks)})
    assert _end(dagster, parent) == "FAILURE", world.story(parent)
    again = dagster.execute_again(parent)
    assert _end(dagster, again) == "SUCCESS", world.story(again)
    _check_the_second_half(world, parent, again, marks)


def _check_the_second_half(world: World, parent: str, again: str, marks: Path) -> None:
    """Only the step that failed ran again, with what the first one had made; the failure's tags stay with the first run."""
    assert marks.read_text().splitlines() == [parent]
    assert marks.with_suffix(".seen").read_text() == "7"
    assert set(_steps(world, again)) == {"dawdles_in_the_first_run"}
    failed = world.run(parent).tags
    assert (failed[FAILURE_TAG], failed[FAILED_STEP_TAG]) == ("time_limit", "dawdles_in_the_first_run")
    begun_anew = world.run(again).tags
    assert (begun_anew[FAILURE_TAG], begun_anew[FAILED_STEP_TAG]) == ("none", "none")
