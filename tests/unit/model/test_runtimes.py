"""What tasks of a kind took tells how long the next one will run."""

from __future__ import annotations

from dataclasses import replace

from builders import a_spec, a_task

from crater_core.model import runtimes
from crater_core.model.runtimes import RunTimes
from crater_core.model.task import TaskStatus, TaskType


def ran(ms: int, status: TaskStatus = TaskStatus.SUCCEEDED, **spec: object) -> object:
    return replace(a_task(**{"name": "train", **spec}), status=status, started_at_ms=100, ended_at_ms=100 + ms)


def learned(*tasks: object) -> RunTimes:
    run_times = RunTimes()
    for task in tasks:
        run_times.learn(task)  # type: ignore[arg-type]
    return run_times


def test_the_mean_of_the_two_newest_runs_is_foretold_rounded_up_by_less_than_a_quarter() -> None:
    foretold = learned(ran(900_000), ran(50_000), ran(70_000)).foretell(a_spec("train"))
    assert foretold is not None
    assert 60_000 <= foretold < 60_000 * 1.25


def test_other_names_projects_and_users_tell_nothing() -> None:
    run_times = learned(ran(50_000))
    assert run_times.foretell(a_spec("other")) is None
    assert run_times.foretell(a_spec("train", project="p")) is None
    assert run_times.foretell(a_spec("train", user="ann")) is None


def test_a_dagster_step_is_told_by_its_own_job_and_partition_first_whoever_ran_it() -> None:
    labels = {"dagster/job": "nightly", "dagster/step_key": "fit", "dagster/partition": "2026-12-01"}
    run_times = learned(ran(2_000, labels=labels, user="bob"), ran(90_000))
    assert run_times.foretell(a_spec("train", labels=labels)) == runtimes.rung(2_000)
    assert run_times.foretell(a_spec("train", labels={**labels, "dagster/job": "weekly"})) == runtimes.rung(90_000)


def test_failures_replicas_and_control_tasks_teach_nothing() -> None:
    run_times = learned(
        ran(1_000, TaskStatus.FAILED), ran(1_000, TaskStatus.CANCELLED), ran(1_000, service="web"), ran(1_000, type="control")
    )
    assert len(run_times) == 0
    assert learned(ran(1_000)).foretell(replace(a_spec("train"), type=TaskType.CONTROL)) is None


def test_kinds_that_were_not_seen_for_long_are_forgotten(monkeypatch: object) -> None:
    monkeypatch.setattr(runtimes, "KINDS_MAX", 2)  # type: ignore[attr-defined]
    run_times = learned(ran(1_000, name="a"), ran(1_000, name="b"), ran(1_000, name="a"), ran(1_000, name="c"))
    assert [run_times.foretell(a_spec(name)) is not None for name in ("a", "b", "c")] == [True, False, True]
