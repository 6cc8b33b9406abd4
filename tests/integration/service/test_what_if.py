"""A dry run says what a submit would do, through the real scheduler, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest
from harness import SchedulerProcess

from crater_core.cli.app import run
from crater_core.client import AsyncCraterClient, CraterClient
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Settings
from crater_core.simulation import read_trace, simulate

from .conftest import Api, FakeAgent


def test_a_dry_run_tells_of_each_task_and_writes_nothing(scheduler: SchedulerProcess, api: Api) -> None:
    agent = FakeAgent(scheduler.url, "whatif", cpu=4)
    agent.register()
    busy = api.submit(resources={"cpu": 3}, pools=["whatif-cpu"], time_limit="1h")
    agent.report(agent.lease_of(busy["id"]), "running")
    before = api.get("/health")["revision"]
    tasks = [
        {"name": name, "command": ["true"], "resources": {"cpu": cpu}, "pools": ["whatif-cpu"]}
        for name, cpu in (("fits", 1), ("waits", 2), ("never", 64))
    ]
    with CraterClient(scheduler.url) as crater:
        fits, waits, never = crater.dry_run(tasks).verdicts
    assert (fits.outcome, [place.node for place in fits.places]) == ("placed", ["whatif"])
    assert (waits.outcome, waits.expected_sure) == ("waiting", True)
    assert waits.expected_start_ms is not None
    assert waits.expected_start_ms == api.task(busy["id"])["started_at_ms"] + 3_600_000
    assert (never.outcome, never.field) == ("refused", "resources.cpu")
    assert api.get("/health")["revision"] == before
    assert [task["name"] for task in api.get("/v1/tasks")["tasks"]] == ["job"]


def test_the_command_and_the_async_client_tell_the_same(
    scheduler: SchedulerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeAgent(scheduler.url, "dry", cpu=2).register()
    tasks = [
        {"name": name, "command": ["true"], "resources": {"cpu": cpu}, "pools": ["dry-cpu"]}
        for name, cpu in (("fits", 2), ("waits", 1), ("never", 64))
    ]

    async def ask() -> list[tuple[str, str]]:
        async with AsyncCraterClient(scheduler.url) as crater:
            return [(one.name, one.outcome) for one in (await crater.dry_run(tasks)).verdicts]

    told = [("fits", "placed"), ("waits", "waiting"), ("never", "refused")]
    assert asyncio.run(ask()) == told
    file = tmp_path / "tasks.yaml"
    file.write_text(json.dumps({"tasks": tasks}))
    assert run(["--endpoint", scheduler.url, "what-if", str(file), "--json"]) == 1, "one would be refused"
    assert [(one["name"], one["outcome"]) for one in json.loads(capsys.readouterr().out)["verdicts"]] == told
    assert run(["--endpoint", scheduler.url, "what-if", str(file)]) == 1
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("fits", "placed", "now", "waiting", "unknown", "refused"))
    words = ["--endpoint", scheduler.url, "submit", "--dry-run", "--json", "--cpu", "1", "--pool", "dry-cpu", "--", "true"]
    assert run(words) == 0
    (alone,) = json.loads(capsys.readouterr().out)["verdicts"]
    assert (alone["outcome"], alone["places"][0]["node"]) == ("placed", "dry")


def test_the_next_decision_can_be_made_elsewhere_from_a_snapshot(
    scheduler: SchedulerProcess, api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeAgent(scheduler.url, "seen", cpu=1).register()
    api.submit(resources={"cpu": 1}, pools=["seen-cpu"], env={"KEY": "hunter2"})
    waits = api.submit(resources={"cpu": 1}, pools=["seen-cpu"], command=["curl", "hunter2"])
    file = tmp_path / "crater.snapshot"
    assert run(["--endpoint", scheduler.url, "debug", "snapshot", str(file)]) == 0
    assert file.stat().st_mode & 0o077 == 0
    assert b"hunter2" not in gzip.decompress(file.read_bytes())
    capsys.readouterr()
    assert run(["debug", "replay", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["placements"] == []
    assert told["waiting"][waits["id"]]["message"] == api.task(waits["id"])["reason"]["message"]
    assert run(["debug", "replay", str(file), "--after", "-5s"]) == 2
    assert capsys.readouterr().err == "crater: --after is not a quantity: '-5s'; give a time such as 30s, 5m or 2h.\n"


def test_a_waiting_task_is_told_when_it_is_expected_to_start(scheduler: SchedulerProcess, api: Api) -> None:
    agent = FakeAgent(scheduler.url, "later", cpu=4)
    agent.register()
    first = api.submit(resources={"cpu": 4}, pools=["later-cpu"], time_limit="30m")
    agent.report(agent.lease_of(first["id"]), "running")
    second = api.submit(resources={"cpu": 4}, pools=["later-cpu"])
    told = api.get(f"/v1/tasks/{second['id']}/explain")
    started = api.task(first["id"])["started_at_ms"]
    assert (told["expected_start_ms"], told["expected_sure"]) == (started + 1_800_000, True)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_clusters_own_history_is_a_trace_that_can_be_replayed(
    form: str, scheduler: SchedulerProcess, api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent = FakeAgent(scheduler.url, f"past-{form}", cpu=8, gpus=2)
    agent.register()
    for gpu in (1, 0.25):
        task = api.submit(resources={"cpu": 2, "gpu": gpu}, pools=[f"past-{form}-gpu"], project=f"past-{form}", time_limit="1h")
        agent.run(task["id"])
    file, nodes = tmp_path / f"history.{form}", tmp_path / "nodes.csv"
    words = ["--endpoint", scheduler.url, "history", "export", str(file), "--nodes", str(nodes), "--project", f"past-{form}"]
    assert run(words) == 0
    trace = read_trace(file, nodes)
    assert sorted(str(arrival.spec.request.gpu) for arrival in trace.arrivals) == sorted(
        [str(GpuRequest(1)), str(GpuRequest(1, 250, 0, exclusive=False))]
    )
    assert {arrival.spec.time_limit_ms for arrival in trace.arrivals} == {3_600_000}
    assert simulate(trace, Settings()).finished == 2
