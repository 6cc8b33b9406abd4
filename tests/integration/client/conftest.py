"""One real scheduler with one real agent for all tests here, and nodes that are nothing but a declaration."""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from agent_harness import AgentProcess, start_agent
from harness import SchedulerProcess, start_scheduler, wait_until

from crater_core.client import CraterClient

GIB = 1024**3


@dataclass
class World:
    scheduler: SchedulerProcess
    agent: AgentProcess
    client: CraterClient
    folder: Path

    @property
    def url(self) -> str:
        return self.scheduler.url

    def python(self, script: str, name: str = "script", **fields: object) -> dict[str, object]:
        """A task that runs a line of Python."""
        return {
            "name": name,
            "command": [sys.executable, "-u", "-c", script],
            "resources": {"cpu": 0.1, "memory": "64MiB"},
        } | fields


def _declare(url: str, name: str, *, cpu: int = 64, memory_bytes: int = 256 * GIB, gpus: int = 0) -> None:
    """A node that no agent runs on: tasks are placed there and wait for ever."""
    amounts = {"cpu_milli": cpu * 1000, "memory_bytes": memory_bytes, "disk_bytes": 4096 * 10**9}
    kinds = {"cpu-pool": "cpu", "memory-pool": "memory", "disk-pool": "disk"} | ({"gpu-pool": "gpu"} if gpus else {})
    devices = [
        {
            "uuid": f"GPU-{name}-{i}",
            "index": i,
            "model": "NVIDIA A100",
            "gpu_type": "a100",
            "memory_mib": 81_920,
            "pool": "gpu-pool",
        }
        for i in range(gpus)
    ]
    body = {"capacity": amounts, "allocatable": amounts, "pools": kinds, "devices": devices}
    httpx.post(f"{url}/v1/agents/{name}/register", json=body, trust_env=False).raise_for_status()


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    folder = Path(tempfile.mkdtemp(prefix="crater-test-"))
    folder.chmod(0o755)
    with start_scheduler(folder) as scheduler, CraterClient(scheduler.url) as client:
        # A range of its own: other agents of this machine hand out theirs.
        agent = start_agent(folder, scheduler.url, "n1", ports={"first": random.randrange(21_000, 31_000), "count": 20})
        try:
            wait_until(client.nodes, 20, "the agent's registration")
            yield World(scheduler, agent, client, folder)
        finally:
            agent.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def bare() -> Iterator[SchedulerProcess]:
    """A scheduler without nodes."""
    folder = Path(tempfile.mkdtemp(prefix="crater-test-"))
    with start_scheduler(folder) as scheduler:
        yield scheduler
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def declare_node() -> Callable[..., None]:
    return _declare
