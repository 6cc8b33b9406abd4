"""The smaller examples do what their first lines say, on two real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from dagster import AssetKey
from dagster_world import World
from harness import wait_until

from crater_core.client import CraterClient
from crater_dagster.pipes_gang import Lines


def test_a_gang_trains_on_two_nodes_and_reports_through_one_session(logging_world: World):
    run_id = logging_world.launch("gang_training")
    assert logging_world.finish(run_id, 120) == "SUCCESS", logging_world.story(run_id)
    event = logging_world.instance.get_latest_materialization_event(AssetKey("gang_model"))
    assert event is not None
    assert event.asset_materialization is not None
    metadata = {name: value.value for name, value in event.asset_materialization.metadata.items()}
    assert metadata["members"] == 2
    assert metadata["slope"] == pytest.approx(3, abs=0.3)
    assert metadata["offset"] == pytest.approx(1, abs=0.3)
    task = logging_world.task_of_role(run_id, "pipes")
    assert sorted(task.nodes) == ["n-left", "n-right"]
    logged = logging_world.log_texts(run_id)
    for member in (0, 1):
        assert any(text.startswith(f"member {member} of 2 has y = ") for text in logged)


def test_many_small_steps_are_fanned_out_and_summed(logging_world: World):
    run_id = logging_world.launch("many_small_steps", {"ops": {"parts": {"config": {"count": 6}}}})
    assert logging_world.finish(run_id) == "SUCCESS", logging_world.story(run_id)
    # There are 783 primes below 6,000.
    assert "783 primes in 6 parts" in logging_world.log_texts(run_id)


@pytest.fixture
def one_at_a_time(cluster: CraterClient) -> Iterator[None]:
    cluster.set_quota("dev-quota", {"limits": {"cpu": 0.5}})
    yield
    cluster.remove_quota("dev-quota")


@pytest.mark.usefixtures("one_at_a_time")
def test_a_backfill_takes_no_more_than_its_quota_and_each_run_says_why_it_waits(logging_world: World):
    days = ["2026-11-01", "2026-11-02", "2026-11-03"]
    runs = [logging_world.launch("daily_reports", tags={"dagster/partition": day}) for day in days]
    for run_id in runs:
        assert logging_world.finish(run_id) == "SUCCESS", logging_world.story(run_id)
    made = logging_world.instance.get_materialized_partitions(AssetKey("daily_report"))
    assert made == set(days)
    tasks = sorted((logging_world.task_of(run_id, "daily_report") for run_id in runs), key=lambda task: task.started_at_ms or 0)
    for before, after in pairwise(tasks):
        assert before.ended_at_ms is not None
        assert after.started_at_ms is not None
        assert before.ended_at_ms <= after.started_at_ms
    told = [message for run_id in runs for message in logging_world.messages(run_id)]
    wait_until(lambda: any("dev-quota" in message for message in told), 5, "a run says that it waits for the quota")


def test_lines_of_a_gang_say_whose_they_are_even_when_they_come_in_pieces(capsys: pytest.CaptureFixture[str]):
    first, second = Lines("stdout", b"[0] "), Lines("stdout", b"[1] ")
    first.feed(b"half a ")
    second.feed(b"one\ntwo\n")
    first.feed(b"line\nand no end")
    first.end()
    assert capsys.readouterr().out == "[1] one\n[1] two\n[0] half a line\n[0] and no end\n"
