"""A gang on two real agents: unchanged programs of `torch.distributed` find each other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_harness import poll_until, start_agent
from harness import start_scheduler

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
node, file = os.environ["CRATER_NODE"], f"{os.environ['SEEN']}/{dist.get_rank()}"
open(file, "w").write(f"{node} {int(total.item())} of {dist.get_world_size()}")
dist.destroy_process_group()
"""
ONE_CORE = [{"name": "cpu-pool", "type": "cpu", "cores": 1}, {"name": "memory-pool", "type": "memory", "size_gb": 2}]


@pytest.fixture
def client(place: Path) -> Iterator[httpx.Client]:
    """A scheduler with two nodes of one core."""
    scheduler = start_scheduler(place, heartbeat_interval="1s", heartbeat_timeout="8s")
    agents = [start_agent(place, scheduler.url, name, resource_pools=ONE_CORE) for name in ("n1", "n2")]
    with httpx.Client(base_url=scheduler.url, trust_env=False, timeout=70) as client:
        poll_until(lambda: len(client.get("/v1/nodes").json()["nodes"]) == 2, what="both nodes registered")
        yield client
    for agent in agents:
        agent.stop()
    scheduler.kill()


def run(client: httpx.Client, place: Path, *command: str, **fields: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The ended task, and what each rank wrote."""
    seen = place / "seen"
    seen.mkdir()
    seen.chmod(0o777)
    (place / "train.py").write_text(ALL_REDUCE)
    body = {
        "name": "gang",
        "command": command,
        "resources": {"cpu": 1, "memory": "900MiB"},
        "env": {"SEEN": str(seen), "USE_LIBUV": "0"},
        **fields,
    }
    answer = client.post("/v1/tasks", json=body)
    assert answer.status_code == 201, answer.text
    task: dict[str, Any] = answer.json()

    def ended() -> dict[str, Any] | None:
        found = client.get(f"/v1/tasks/{task['id']}", params={"wait": 20, "after": task["revision"]}).json()
        task.update(found)
        return found if found["status"] in ("succeeded", "failed", "cancelled") else None

    end = poll_until(ended, 90, "the gang ended")
    assert end is not None
    return end, {path.name: path.read_text() for path in seen.iterdir()}


def test_members_on_two_nodes_meet_by_the_environment_alone(client: httpx.Client, place: Path):
    end, seen = run(client, place, sys.executable, str(place / "train.py"), members=2)
    assert (end["status"], end["members"], sorted(end["nodes"])) == ("succeeded", 2, ["n1", "n2"]), end["reason"]
    assert sorted(seen) == ["0", "1"]
    assert sorted(text.split(" ", 1)[0] for text in seen.values()) == ["n1", "n2"]
    assert {text.split(" ", 1)[1] for text in seen.values()} == {"3 of 2"}


def test_torchrun_needs_no_argument_and_an_elastic_gang_is_as_large_as_it_fits(client: httpx.Client, place: Path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", str(place / "train.py"))
    end, seen = run(client, place, *torchrun, members_min=1, members_max=5)
    assert (end["status"], end["members"]) == ("succeeded", 2), end["reason"]
    assert {text.split(" ", 1)[1] for text in seen.values()} == {"3 of 2"}
