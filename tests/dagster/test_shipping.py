"""Copies of output at a place of one's own: what is copied, for how long it stays, and that a place that fails fails nothing."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

import fsspec
import pytest
from dagster import DagsterEventType
from dagster_world import World, a_home
from harness import PATIENCE_S, SchedulerProcess, wait_until

from crater_core.client import CraterClient
from crater_core.errors import BadConfiguration
from crater_core.wire.tasks import TaskView
from crater_dagster import CraterComputeLogManager
from crater_dagster.logs import key_of
from crater_dagster.shipping import Shipped, Target, end_of, expired


@pytest.fixture(scope="module")
def copies(place: Path) -> Path:
    return place / "copies"


@pytest.fixture(scope="module")
def shipping_world(place: Path, scheduler: SchedulerProcess, cluster: CraterClient, copies: Path) -> Iterator[World]:
    logs = {
        "module": "crater_dagster",
        "class": "CraterComputeLogManager",
        "config": {"ship_to": {"url": copies.as_uri(), "keep_days": 30}},
    }
    with World.open(a_home(place, scheduler.url, "shipping", compute_logs=logs), cluster) as running:
        yield running


def _copy(copies: Path, run_id: str, view: TaskView, stream: str) -> bytes:
    return (copies / datetime.now(UTC).date().isoformat() / run_id / f"{view.id}.{view.allocation}" / f"{stream}.0").read_bytes()


def _gone_from_the_node(world: World, view: TaskView) -> None:
    (logs,) = world.place.rglob(f"logs/{view.allocation}")
    shutil.rmtree(logs)


def _key(run_id: str, view: TaskView) -> list[str]:
    assert view.allocation is not None
    return [run_id, "compute_logs", key_of(view.id, view.allocation)]


def test_output_of_each_step_and_of_the_worker_is_copied_and_read_when_the_node_has_it_no_more(
    shipping_world: World, copies: Path
):
    (copies / "2001-01-01" / "old").mkdir(parents=True)
    run_id = shipping_world.launch("loop")
    assert shipping_world.finish(run_id) == "SUCCESS", shipping_world.story(run_id)
    wait_until(lambda: shipping_world.task_of(run_id, None).ended, PATIENCE_S, "the worker has copied what there is")
    step, worker = shipping_world.task_of(run_id, "left"), shipping_world.task_of(run_id, None)
    assert b"left speaks on stdout" in _copy(copies, run_id, step, "stdout")
    assert b"RUN_SUCCESS" in _copy(copies, run_id, worker, "stderr")
    assert not (copies / "2001-01-01").exists()
    manager = shipping_world.instance.compute_log_manager
    alive = manager.get_log_data(_key(run_id, step))
    _gone_from_the_node(shipping_world, step)
    gone = manager.get_log_data(_key(run_id, step))
    assert (gone.stdout, gone.cursor) == (alive.stdout, alive.cursor)
    assert (manager.get_log_data(_key(run_id, step), gone.cursor)).stdout is None
    assert copies.as_uri() in (manager.get_log_metadata(_key(run_id, step)).stdout_location or "")
    manager.delete_logs(log_key=_key(run_id, step))
    assert manager.get_log_data(_key(run_id, step)).stdout is None


def test_output_of_a_step_that_was_killed_is_copied(shipping_world: World, copies: Path):
    run_id = shipping_world.launch("killed")
    assert shipping_world.finish(run_id) == "FAILURE"
    wait_until(lambda: shipping_world.task_of(run_id, None).ended, PATIENCE_S, "the worker has copied what there is")
    assert b"STEP_START" in _copy(copies, run_id, shipping_world.task_of(run_id, "dies"), "stderr")


def test_output_of_a_step_whose_process_ends_after_the_run_is_copied_whole(shipping_world: World, copies: Path):
    run_id = shipping_world.launch("leaving_slowly")
    assert shipping_world.finish(run_id) == "SUCCESS", shipping_world.story(run_id)
    assert not shipping_world.task_of(run_id, "leaves_slowly").ended
    wait_until(lambda: shipping_world.task_of(run_id, None).ended, PATIENCE_S, "the worker has copied what there is")
    assert b"last words" in _copy(copies, run_id, shipping_world.task_of(run_id, "leaves_slowly"), "stdout")


def test_output_of_a_step_that_is_cancelled_with_its_run_is_copied(shipping_world: World, copies: Path):
    run_id = shipping_world.launch("talking")
    wait_until(lambda: shipping_world.events(run_id, DagsterEventType.LOGS_CAPTURED), PATIENCE_S, "the step runs")
    wait_until(lambda: b"line 0" in shipping_world.captured(run_id)[0], PATIENCE_S, "it has spoken")
    assert shipping_world.launcher.terminate(run_id) is True
    assert shipping_world.finish(run_id) == "CANCELED", shipping_world.story(run_id)
    wait_until(lambda: shipping_world.task_of(run_id, None).ended, 60, "the worker has copied what there is")
    assert b"line 0" in _copy(copies, run_id, shipping_world.task_of(run_id, "talks"), "stdout")


def test_a_place_that_fails_is_a_warning_with_the_reason_and_fails_no_step(shipping_world: World, copies: Path):
    shutil.rmtree(copies, ignore_errors=True)
    copies.write_text("a file, where a folder should be")
    try:
        run_id = shipping_world.launch("loop")
        assert shipping_world.finish(run_id) == "SUCCESS", shipping_world.story(run_id)
        wait_until(lambda: shipping_world.task_of(run_id, None).ended, PATIENCE_S, "the worker has tried")
    finally:
        copies.unlink()
    entries = shipping_world.instance.all_logs(run_id, of_type=DagsterEventType.ENGINE_EVENT)
    warnings = [entry for entry in entries if entry.level == logging.WARNING]
    told = {entry.step_key: entry.dagster_event.message or "" for entry in warnings if entry.dagster_event}
    assert set(told) == {"left", "right", "both", None}
    assert f"The output of step left could not be copied to {copies.as_uri()}: " in told["left"]
    assert "NotADirectoryError" in told["left"] or "FileExistsError" in told["left"]


# What a copy holds, in memory


@pytest.fixture
def memory() -> Iterator[Target]:
    yield Target("memory://copies", max_bytes=10)
    fsspec.filesystem("memory").store.clear()


def test_the_end_of_a_stream_is_kept_and_read_by_the_streams_own_offsets(cluster: CraterClient, memory: Target):
    task = cluster.submit(
        {"name": "says", "command": ["printf", "0123456789abcdef"], "resources": {"cpu": 0.1, "memory": "64MiB"}}
    )
    done = cluster.wait(task.id, 30)
    assert done.allocation is not None
    offset, content = end_of(cluster, done.id, done.allocation, "stdout", 10)
    assert (offset, content) == (6, b"6789abcdef")
    shipped, folder = Shipped(memory), memory.folder(date(2026, 5, 4), "r", done.id, done.allocation)
    assert folder == f"2026-05-04/r/{done.id}.{done.allocation}"
    shipped.write(folder, "stdout", offset, content)
    assert shipped.read(folder, "stdout", 0, 4) == (b"6789", 10)
    assert shipped.read(folder, "stdout", 10, 100) == (b"abcdef", 16)
    assert shipped.read(folder, "stdout", 16, 100) == (b"", 16)
    assert shipped.read(folder, "stderr", 0, 100) == (b"", 0)


def test_only_days_that_are_over_go():
    names = ["2026-03-01", "2026-03-02", "2026-03-09", "other", "20260101", "2026-W01-1"]
    assert expired(names, 7, date(2026, 3, 9)) == ["2026-03-01"]


@pytest.mark.parametrize("id", ["..", "a/b", "", "x" * 101])
def test_no_id_climbs_out_of_the_place(memory: Target, id: str):
    with pytest.raises(BadConfiguration, match="no id that may be part of a path"):
        memory.folder(date(2026, 5, 4), "run", id, "a1")


def test_no_secret_of_url_or_options_is_told():
    target = Target("ftp://ann:pass123@files.example/logs?sig=q9", {"client": {"secret": "k3y-k3y"}})
    assert target.shown == "ftp://files.example/logs"
    told = target.scrubbed("530 ann:pass123 is refused at ftp://ann:pass123@files.example/logs?sig=q9 with k3y-k3y")
    assert told == "530 *** is refused at ftp://files.example/logs with ***"


@pytest.mark.parametrize(
    ("ship_to", "said"),
    [
        ({"url": "/srv/logs"}, "ship_to.url must be a URL"),
        ({"url": "file:///srv", "keep_days": 0}, "ship_to.keep_days must be at least 1"),
        ({"url": "file:///srv", "max_bytes": "3 parsecs"}, "ship_to.max_bytes"),
    ],
)
def test_a_wrong_place_is_told_by_its_field(ship_to: dict[str, object], said: str):
    with pytest.raises((BadConfiguration, ValueError), match=said):
        CraterComputeLogManager(ship_to=ship_to)
