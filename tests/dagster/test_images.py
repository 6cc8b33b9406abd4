"""Runs of a code location that has an image: worker and steps are containers of a real engine, with the image's own code."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import start_agent
from base_image import CHANGES, as_layer, make_tree
from dagster import DagsterEventType
from dagster_service import a_code_server
from dagster_world import FIRST_PORT, World, a_home
from docker_world import DockerWorld
from harness import PATIENCE_S, SchedulerProcess, free_port, wait_until

from crater_core.client import CraterClient
from crater_dagster import crater_tags
from crater_dagster.reasons import FAILURE_TAG

ROOT = Path(__file__).parents[2]
IMAGE = "team-pipelines:3"


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the code location's file lies: here, and under the same name in the image."""
    file = tmp_path_factory.mktemp("code") / "pipelines_image.py"
    return Path(shutil.copy(Path(__file__).parent / file.name, file))


@pytest.fixture(scope="module")
def engine(code: Path) -> Iterator[DockerWorld]:
    world = DockerWorld().start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder)
            make_tree(tree)
            for package in ("crater_core", "crater_dagster"):
                shutil.copytree(ROOT / package, tree / "deps" / package, ignore=shutil.ignore_patterns("__pycache__"))
            inside = tree / str(code).lstrip("/")
            inside.parent.mkdir(parents=True)
            inside.write_text(code.read_text().replace('WHERE = "here"', 'WHERE = "the image"'))
            world.add(as_layer(tree), IMAGE, CHANGES)
        yield world
    finally:
        world.remove()


@pytest.fixture(scope="module")
def box(place: Path, scheduler: SchedulerProcess, cluster: CraterClient, engine: DockerWorld, code: Path) -> Iterator[World]:
    """An instance whose code location says which image it is in, and a node that runs containers."""
    home, port = place / "boxes", free_port()
    options = {"mounts": [{"source": str(home), "target": str(home), "read_only": False}]}
    logs = {"module": "crater_dagster", "class": "CraterComputeLogManager", "config": {"endpoint": scheduler.url}}
    a_home(place, scheduler.url, "boxes", options, compute_logs=logs)
    agent = start_agent(
        place,
        scheduler.url,
        "n-box",
        docker={"socket": str(engine.socket), "enabled": True},
        labels={"side": "box"},
        env_profiles={"boxes": {"DAGSTER_HOME": str(home)}},
        mount_roots=[str(home)],
        control={"slots": 4, "memory": "4GB"},
        ports={"first": FIRST_PORT + 180, "count": 20},
    )
    try:
        wait_until(lambda: cluster.health().nodes_ready == 3, PATIENCE_S, "the third node")
        with (
            a_code_server(code, home / "code.log", port, {"python": "python3"}, "--container-image", IMAGE),
            World.open(home, cluster, code, port) as world,
        ):
            yield world
    finally:
        agent.stop()
        engine.clear({"label": [f"crater.agent={agent.group_name}"]})


def _containers(engine: DockerWorld, world: World, run_id: str) -> list[str]:
    with engine.client() as client:
        found = [client.containers(all=True, filters={"label": [f"crater.task={task.id}"]}) for task in world.tasks(run_id)]
    return [container["Id"] for containers in found for container in containers]


def test_worker_and_steps_run_in_the_image_of_the_code_location(box: World):
    run_id = box.launch("in_an_image")
    assert box.finish(run_id) == "SUCCESS", box.story(run_id)
    tasks = box.tasks(run_id)
    assert {(task.labels.get("dagster/step_key"), task.image, task.node) for task in tasks} == {
        (step, IMAGE, "n-box") for step in (None, "looks", "tells")
    }
    output = next(event for event in box.events(run_id, DagsterEventType.STEP_OUTPUT) if event.step_key == "tells")
    told = {key: value.value for key, value in output.step_output_data.metadata.items()}
    assert (told["where"], told["told by"]) == ("the image", "the image")
    assert "deps" in told["root"].split(",")
    assert box.captured(run_id)[0] == b"this is the image\n"


def test_a_run_in_one_process_is_one_container(box: World):
    run_id = box.launch("in_one_process", tags=crater_tags(run_on="compute", cpu=0.5, memory="400MiB"))
    assert box.finish(run_id) == "SUCCESS", box.story(run_id)
    (task,) = box.tasks(run_id)
    assert (task.image, task.node, task.type) == (IMAGE, "n-box", "batch")


def test_a_step_in_a_container_that_takes_too_much_memory_fails_with_the_numbers(box: World):
    run_id = box.launch("too_much")
    assert box.finish(run_id) == "FAILURE", box.story(run_id)
    assert "400 MiB" in box.failure(run_id)
    assert box.run(run_id).tags[FAILURE_TAG] == "oom"


def test_terminating_the_run_leaves_no_container(box: World, engine: DockerWorld, place: Path):
    mark = place / "boxes" / "mark"
    run_id = box.launch("long", tags={"mark": str(mark)})
    wait_until(mark.exists, PATIENCE_S, "the step runs")
    assert len(_containers(engine, box, run_id)) == 2
    assert box.launcher.terminate(run_id)
    assert box.finish(run_id) == "CANCELED", box.story(run_id)
    box.no_task_lives(run_id)
    wait_until(lambda: not _containers(engine, box, run_id), 20, "no container of the run is left")
