"""Dagster on PostgreSQL: runs on two nodes, with connections that are kept while they are used and no longer."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster import DagsterEventType
from dagster_service import a_dagster
from dagster_world import World, a_home
from harness import PATIENCE_S, SchedulerProcess, wait_until
from postgres_server import PostgresServer, a_postgres
from sqlalchemy import create_engine, text

from crater_core.client import CraterClient
from crater_dagster._dagster import RetryMode, storage_id
from crater_dagster.connections import kept_connections
from crater_dagster.executor import CraterExecutor


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with a_postgres() as server:
        yield server


PASSWORD = "not-for-nodes-7f3a"


@pytest.fixture(scope="module")
def pg_world(place: Path, scheduler: SchedulerProcess, cluster: CraterClient, postgres: PostgresServer) -> Iterator[World]:
    url = postgres.create_database("dagster")
    postgres.query("dagster", f"create role dagster login superuser password '{PASSWORD}'")
    further = {
        "storage": {"postgres": {"postgres_url": url.replace("//postgres@", f"//dagster:{PASSWORD}@")}},
        "compute_logs": {"module": "crater_dagster", "class": "CraterComputeLogManager", "config": {"endpoint": scheduler.url}},
    }
    with World.open(a_home(place, scheduler.url, "postgres", **further), cluster) as running:
        yield running


@pytest.fixture(scope="module")
def pg_rules_world(pg_world: World, place: Path, cluster: CraterClient) -> Iterator[World]:
    with World.open(place / "postgres", cluster, Path(__file__).parent / "pipelines_rules.py") as running:
        yield running


def test_a_run_on_postgresql_succeeds_with_steps_on_two_nodes(pg_world: World):
    run_id = pg_world.launch("loop")
    assert pg_world.finish(run_id) == "SUCCESS", pg_world.story(run_id)
    assert {pg_world.task_of(run_id, step).node for step in ("left", "right")} == {"n-left", "n-right"}
    assert len(pg_world.events(run_id, DagsterEventType.ASSET_MATERIALIZATION)) == 3


def test_a_run_on_postgresql_that_is_terminated_leaves_no_task(pg_world: World):
    run_id = pg_world.launch("slow_in_one_process")
    wait_until(lambda: pg_world.run(run_id).status.value == "STARTED", PATIENCE_S, "the run has started")
    assert pg_world.instance.run_launcher.terminate(run_id)
    assert pg_world.finish(run_id) == "CANCELED", pg_world.story(run_id)
    pg_world.no_task_lives(run_id)


def test_a_pool_of_one_slot_lets_one_step_of_two_runs_be_asked_for(pg_rules_world: World, tmp_path: Path):
    world, gate = pg_rules_world, tmp_path / "gate"
    world.instance.event_log_storage.set_concurrency_slots("database", 1)
    runs = [world.launch("pooling", tags={"gate": str(gate)}) for _ in range(2)]
    blocked = lambda: all(any("blocked by" in text for text in world.messages(run)) for run in runs)  # noqa: E731
    wait_until(blocked, PATIENCE_S, "both runs are told what they wait for")
    steps = lambda: [task for run in runs for task in world.tasks(run) if task.labels["crater/role"] == "step"]  # noqa: E731
    wait_until(lambda: len(steps()) == 1, PATIENCE_S, "one step is asked for")
    gate.touch()
    assert [world.finish(run) for run in runs] == ["SUCCESS", "SUCCESS"], [world.story(run) for run in runs]
    assert len(steps()) == 6
    moves = sorted(
        (entry.timestamp, {"STEP_START": 1, "STEP_SUCCESS": -1}[entry.dagster_event.event_type_value])
        for run in runs
        for entry in world.instance.all_logs(run, of_type={DagsterEventType.STEP_START, DagsterEventType.STEP_SUCCESS})
    )
    assert [move for _, move in moves] == [1, -1] * 6
    slots = world.instance.event_log_storage.get_concurrency_info("database")
    assert (slots.slot_count, slots.active_slot_count, slots.pending_step_count) == (1, 0, 0)


def test_tasks_carry_the_id_of_the_instances_database(pg_world: World, postgres: PostgresServer):
    run_id = pg_world.launch("in_one_process")
    assert pg_world.finish(run_id) == "SUCCESS", pg_world.story(run_id)
    owner = postgres.query("dagster", "select run_storage_id from instance_info")[0][0]
    assert storage_id(pg_world.instance) == owner
    assert pg_world.task_of(run_id, None).labels["dagster/instance"] == owner


def _files(folder: Path) -> dict[Path, bytes]:
    """What is kept there; some of it may go away meanwhile."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file():
                found[path] = path.read_bytes()
    return found


def test_the_databases_password_is_in_no_submission_no_command_line_and_no_store(pg_world: World, place: Path, tmp_path: Path):
    """It is in the instance's own configuration, which Dagster would hand to its workers on their command line."""
    gate = tmp_path / "gate"
    config = {"ops": {"waits_for_a_file": {"config": {"wait_for": str(gate)}}}}
    run_id = pg_world.launch("interrupted", config, {"crater/warm": "off"})
    wait_until(lambda: pg_world.events(run_id, DagsterEventType.STEP_START), PATIENCE_S, "the first step has started")
    secret = PASSWORD.encode()
    for step in (None, "waits_for_a_file"):
        process = Path(f"/proc/{pg_world.worker_pid(run_id, step)}")
        assert b"DAGSTER_CRATER_ARGS" in (process / "environ").read_bytes()
        assert secret not in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    kept = _files(place / "scheduler-home") | _files(place / "agent-n-left") | _files(place / "agent-n-right")
    assert {"crater.db", "started.json"} <= {path.name for path in kept}
    assert [path for path, content in kept.items() if secret in content] == []
    assert secret in (place / "postgres" / "dagster.yaml").read_bytes()
    gate.touch()
    assert pg_world.finish(run_id) == "SUCCESS", pg_world.story(run_id)
    shown = json.dumps([task.model_dump(mode="json") for task in pg_world.tasks(run_id)])
    assert PASSWORD not in shown + pg_world.story(run_id)


def test_daemon_and_web_server_on_postgresql_take_a_run_from_the_queue_to_its_output(pg_world: World):
    with a_dagster(pg_world, "postgres") as dagster:
        run_id = dagster.launch("loop")
        wait_until(lambda: dagster.status(run_id) in ("SUCCESS", "FAILURE"), PATIENCE_S, "the run has ended")
        assert dagster.status(run_id) == "SUCCESS", pg_world.story(run_id)
        assert "left speaks on stdout" in dagster.stdout(run_id, "left")
    kinds = [event.event_type_value for event in pg_world.events(run_id)]
    assert kinds.index("PIPELINE_ENQUEUED") < kinds.index("PIPELINE_STARTING") < kinds.index("PIPELINE_SUCCESS")


class _Quiet:
    """Follows nothing, and takes in everything."""

    in_flight = False

    def follow(self) -> None: ...

    def take_in(self, event: object) -> bool:
        return True


def test_an_event_that_becomes_visible_after_a_later_one_is_not_missed(pg_world: World, postgres: PostgresServer):
    # PostgreSQL numbers an event before its transaction ends: of two steps that write at once, the later may be seen first.
    run = pg_world.create("loop")
    executor, seen = CraterExecutor(_Quiet(), retries=RetryMode.DISABLED), set[int]()

    def popped() -> list[str | None]:
        return [event.message for event in executor._pop_events(pg_world.instance, run.run_id, seen)]

    assert popped()  # What stands there from the making of the run.
    reserved = int(postgres.query("dagster", "select nextval('event_logs_id_seq')")[0][0])
    pg_world.instance.report_engine_event("the later one", run)
    assert popped() == ["the later one"]
    columns = "run_id, dagster_event_type, timestamp"
    postgres.query(
        "dagster",
        f"insert into event_logs (id, event, {columns}) select {reserved}, replace(event, 'later', 'earlier'), {columns} "
        f"from event_logs where run_id = '{run.run_id}' and id = (select max(id) from event_logs where run_id = '{run.run_id}')",
    )
    assert popped() == ["the earlier one"]
    assert popped() == []


def _connections(postgres: PostgresServer) -> int:
    return int(postgres.query("postgres", "select count(*) from pg_stat_activity where application_name = 'kept'")[0][0])


def test_a_kept_connection_is_closed_when_idle_and_opened_again_when_needed(postgres: PostgresServer):
    engine = create_engine(
        postgres.create_database("kept"), pool_size=1, connect_args={"application_name": "kept"}, isolation_level="AUTOCOMMIT"
    )
    threads = threading.active_count()
    with kept_connections([engine], idle_s=0.1):
        for _ in range(2):
            with engine.connect() as connection:
                assert connection.execute(text("select 1")).scalar() == 1
                assert _connections(postgres) == 1
            wait_until(lambda: _connections(postgres) == 0, 10, "the idle connection is closed")
    assert threading.active_count() == threads
    engine.dispose()


def test_a_connection_that_was_in_use_for_long_is_closed_when_idle_too(postgres: PostgresServer):
    engine = create_engine(
        postgres.create_database("used"), pool_size=1, connect_args={"application_name": "kept"}, isolation_level="AUTOCOMMIT"
    )
    gc.disable()  # The garbage collector would close what has been lost, some time.
    try:
        with kept_connections([engine], idle_s=0.1):
            with engine.connect():
                time.sleep(1)
            wait_until(lambda: _connections(postgres) == 0, 10, "the idle connection is closed")
    finally:
        gc.enable()
    engine.dispose()
