"""`crater backup` and `crater restore`: from a scheduler that runs, into a store of another kind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from callers import Api, FakeAgent
from harness import SchedulerProcess, start_scheduler
from servers import PostgresServer


def crater(*arguments: str, endpoint: str = "http://127.0.0.1:1") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CRATER_ENDPOINT": endpoint}
    command = [sys.executable, "-m", "crater_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60, check=False)


def test_a_cluster_moves_from_sqlite_to_postgres_with_all_that_it_knows(
    tmp_path: Path, own: list[SchedulerProcess], postgres_server: PostgresServer
) -> None:
    first = start_scheduler(tmp_path / "a")
    own.append(first)
    agent, api = FakeAgent(first.url, "n1"), Api(first.url)
    agent.register()
    done, running, waiting = api.submit(key="k"), api.submit(), api.submit(resources={"cpu": 8})
    agent.run(done["id"])
    lease = agent.lease_of(running["id"])
    agent.report(lease, "running")
    file = tmp_path / "crater.backup"
    assert crater("backup", str(file), endpoint=first.url).returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    term = api.get("/v1/leader")["term"]
    first.kill()

    url = postgres_server.database()
    restored = crater("restore", str(file), "--store", url)
    assert restored.returncode == 0, restored.stderr
    again = crater("restore", str(file), "--store", url)
    assert (again.returncode, "--force" in again.stderr) == (1, True)
    assert crater("restore", str(file), "--store", url, "--force").returncode == 0

    second = start_scheduler(tmp_path / "b", database_url=url)
    own.append(second)
    api, agent = Api(second.url), FakeAgent(second.url, "n1")
    assert agent.register()["term"] > term  # An agent that heard the old scheduler must take orders of the new one.
    assert agent.lease_of(running["id"]) == {**lease, "started": True}
    assert api.submit(key="k")["id"] == done["id"]
    assert api.whats(done["id"]) == ["queued", "allocated", "started", "succeeded"]
    assert api.task(waiting["id"])["status"] == "queued"
    assert api.get("/v1/usage")["rows"][0]["tasks"] == 2
    refused = crater("restore", str(file), "--store", url, "--force")
    assert (refused.returncode, "stop it first" in refused.stderr) == (1, True)


def test_a_backup_that_is_not_whole_is_refused_and_changes_nothing(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    Api(scheduler.url).submit()
    file = tmp_path / "crater.backup"
    assert crater("backup", str(file), endpoint=scheduler.url).returncode == 0
    file.write_bytes(file.read_bytes()[:-30])
    store = f"sqlite:///{tmp_path}/new.db"
    refused = crater("restore", str(file), "--store", store)
    assert refused.returncode == 2
    assert "the backup cannot be read" in refused.stderr
    busy = crater("restore", str(file), "--store", f"sqlite:///{scheduler.database}", "--force")
    assert "in use by another scheduler" in busy.stderr
