"""The SQLite files that workers keep open, beside other processes that make and use the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from dagster import DagsterInstance, DagsterRun, job

from crater_dagster._dagster import keep_connections


@job
def _job() -> None: ...


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[DagsterInstance]:
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump({"telemetry": {"enabled": False}}))
    with DagsterInstance.from_config(str(tmp_path)) as opened:
        keep_connections(opened)
        yield opened


def _tells(instance: DagsterInstance, run: DagsterRun) -> list[str]:
    instance.report_engine_event("told", run)
    return [entry.dagster_event.message or "" for entry in instance.all_logs(run.run_id) if entry.dagster_event]


def _file_of(instance: DagsterInstance, run: DagsterRun) -> Path:
    return Path(instance.event_log_storage.path_for_shard(run.run_id))  # pyright: ignore[reportAttributeAccessIssue]


def test_the_first_event_of_a_run_makes_its_file(instance: DagsterInstance):
    run = instance.create_run_for_job(_job)
    assert not _file_of(instance, run).exists()
    assert _tells(instance, run) == ["told"]


def test_a_file_that_another_process_has_only_begun_to_make_is_finished(instance: DagsterInstance):
    run = instance.create_run_for_job(_job)
    _file_of(instance, run).touch()
    assert _tells(instance, run) == ["told"]


def test_a_file_that_another_process_has_made_is_used_as_it_is(instance: DagsterInstance, tmp_path: Path):
    run = instance.create_run_for_job(_job)
    with DagsterInstance.from_config(str(tmp_path)) as other:
        other.report_engine_event("the other", run)
    assert _tells(instance, run) == ["the other", "told"]
