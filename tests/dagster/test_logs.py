"""Output of steps as Dagster's web page reads it, from the agents, with nothing on a shared disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterEventType
from dagster._core.storage.compute_log_manager import CapturedLogData
from dagster_world import World
from harness import PATIENCE_S, wait_until

from crater_dagster import CraterComputeLogManager
from crater_dagster.logs import named_in


@pytest.fixture
def manager(world: World, tmp_path: Path) -> Iterator[CraterComputeLogManager]:
    manager = CraterComputeLogManager(endpoint=world.client.endpoints[0], base_dir=str(tmp_path / "local"))
    manager.register_instance(world.instance)
    yield manager
    manager.dispose()


def _key(world: World, run_id: str, manager: CraterComputeLogManager, step: str) -> list[str]:
    events = [e for e in world.events(run_id, DagsterEventType.LOGS_CAPTURED) if step in (e.logs_captured_data.step_keys or [])]
    return list(manager.build_log_key_for_run(run_id, events[-1].logs_captured_data.file_key))


def test_a_steps_output_is_read_from_its_node_after_the_end(logging_world: World, manager: CraterComputeLogManager):
    run_id = logging_world.launch("loop")
    assert logging_world.finish(run_id) == "SUCCESS", logging_world.story(run_id)
    key = _key(logging_world, run_id, manager, "left")
    assert named_in(key) is not None
    data = manager.get_log_data(key)
    assert b"left speaks on stdout" in (data.stdout or b"")
    assert b"STEP_SUCCESS" in (data.stderr or b"")
    again = manager.get_log_data(key, data.cursor)
    assert (again.stdout, again.cursor) == (None, data.cursor)


def test_output_of_a_killed_step_is_there(logging_world: World, manager: CraterComputeLogManager):
    run_id = logging_world.launch("killed")
    assert logging_world.finish(run_id) == "FAILURE"
    key = _key(logging_world, run_id, manager, "dies")
    assert b"STEP_START" in (manager.get_log_data(key).stderr or b"")
    wait_until(lambda: manager.is_capture_complete(key), 10, "the end is known")


def test_a_reader_sees_output_while_the_step_runs_and_is_told_of_the_end(
    logging_world: World, manager: CraterComputeLogManager, tmp_path: Path
):
    mark = tmp_path / "mark"
    run_id = logging_world.launch("speaking", {"ops": {"speaks": {"config": {"wait_for": str(mark)}}}})
    wait_until(lambda: logging_world.events(run_id, DagsterEventType.LOGS_CAPTURED), PATIENCE_S, "the step runs")
    seen: list[bytes] = []
    ended = threading.Event()
    subscription = manager.subscribe(_key(logging_world, run_id, manager, "speaks"))

    def observe(data: CapturedLogData) -> None:
        seen.append(data.stdout or b"")
        if subscription.is_complete:
            ended.set()

    subscription(observe)
    wait_until(lambda: b"first words" in b"".join(seen), 20, "words of a step that runs")
    mark.touch()
    assert ended.wait(20)
    assert b"".join(seen).count(b"first words") == 1
    assert b"last words" in b"".join(seen)
    subscription.dispose()
    assert logging_world.finish(run_id) == "SUCCESS"


def test_what_runs_outside_of_tasks_goes_to_files(manager: CraterComputeLogManager):
    key = ["run", "compute_logs", "abc"]
    assert list(manager.build_log_key_for_run("run", "abc")) == key
    with manager.open_log_stream(key, _stderr()) as stream:
        assert stream is not None
        stream.write("of a tick\n")  # type: ignore[arg-type]
    assert manager.get_log_data(key).stderr == b"of a tick\n"


def _stderr():
    from dagster._core.storage.compute_log_manager import ComputeIOType

    return ComputeIOType.STDERR
