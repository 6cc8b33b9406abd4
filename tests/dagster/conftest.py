"""A real scheduler, two real agents, and a real Dagster instance on SQLite, for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_harness import AgentProcess, start_agent
from dagster_world import World
from harness import SchedulerProcess, start_scheduler, wait_until

from crater_core.client import CraterClient


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory with a short path."""
    path = Path(tempfile.mkdtemp(prefix="crater-dagster-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def scheduler(place: Path) -> Iterator[SchedulerProcess]:
    with start_scheduler(place / "scheduler-home") as running:
        yield running


def _agent(place: Path, url: str, name: str, side: str, gpu: bool) -> AgentProcess:
    overrides: dict[str, Any] = {
        "labels": {"side": side},
        "env_profiles": {"dagster": {"DAGSTER_HOME": str(place / "dagster"), "CRATER_ENDPOINT": url, "DO_NOT_TRACK": "1"}},
        "control": {"slots": 4, "memory": "4GB"},
        "ports": {"first": 31_000 if side == "left" else 31_100, "count": 100},
        "sample_interval": "5s",
    }
    if gpu:
        overrides["simulated_gpus"] = [{"count": 1, "memory": "8GiB"}]
        overrides["gpu_sharing"] = {"enabled": True, "compute_mode": "time_slice"}
        pools = [
            {"name": "cpu-pool", "type": "cpu", "cores": 2},
            {"name": "memory-pool", "type": "memory", "size_gb": 4},
            {"name": "gpu-pool", "type": "gpu", "devices": [0]},
        ]
        overrides["resource_pools"] = pools
    return start_agent(place, url, name, **overrides)


@pytest.fixture(scope="session")
def cluster(place: Path, scheduler: SchedulerProcess) -> Iterator[CraterClient]:
    agents = [_agent(place, scheduler.url, "n-left", "left", True), _agent(place, scheduler.url, "n-right", "right", False)]
    client = CraterClient(scheduler.url)
    try:
        wait_until(lambda: client.health().nodes_ready == 2, 30, "two nodes")
        yield client
    finally:
        client.close()
        for agent in agents:
            agent.stop()


@pytest.fixture(scope="session")
def world(place: Path, scheduler: SchedulerProcess, cluster: CraterClient) -> Iterator[World]:
    home = place / "dagster"
    home.mkdir()
    launcher = {
        "module": "crater_dagster",
        "class": "CraterRunLauncher",
        "config": {"endpoint": scheduler.url, "env_profile": "dagster", "grace": "3s", "unreachable_grace": "2s"},
    }
    settings = {"run_launcher": launcher, "telemetry": {"enabled": False}}
    (home / "dagster.yaml").write_text(yaml.safe_dump(settings))
    with World.open(home, cluster) as running:
        yield running
