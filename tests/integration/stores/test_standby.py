"""Two schedulers on one store: one leads, the other follows, takes over in time, and nothing is lost or done twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from callers import Api, FakeAgent
from harness import SchedulerProcess, start_scheduler, wait_until

from crater_core.client import CraterClient

Start = Callable[..., SchedulerProcess]
LEASE_S = 2
QUICK = {"leader_lease": f"{LEASE_S}s", "heartbeat_interval": "1s", "heartbeat_timeout": "10s"}


@pytest.fixture(params=["postgres", "etcd"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The keys of scheduler.yaml that name one store for all schedulers of a test."""
    if request.param == "postgres":
        return {"database_url": request.getfixturevalue("postgres_server").database()}
    server = request.getfixturevalue("etcd_server")
    return {"etcd_endpoints": [server.url], "etcd_prefix": f"/{tmp_path.name}/"}


@pytest.fixture
def start(shared: dict[str, Any], tmp_path: Path, own: list[SchedulerProcess]) -> Start:
    def begin(name: str, **more: str) -> SchedulerProcess:
        own.append(start_scheduler(tmp_path / name, **{**QUICK, **shared, **more}))
        return own[-1]

    return begin


def leads(scheduler: SchedulerProcess) -> bool:
    return Api(scheduler.url).get("/v1/leader")["leading"]


def test_a_standby_reads_with_its_revision_and_sends_writers_to_the_leader(start: Start) -> None:
    leader, standby = start("a"), start("b")
    api, other = Api(leader.url), Api(standby.url)
    FakeAgent(leader.url, "n1").register()
    task = api.submit(labels={"x": "y"})
    wait_until(lambda: other.http.get(f"/v1/tasks/{task['id']}").status_code == 200, 5, "the standby to follow")
    seen = other.http.get(f"/v1/tasks/{task['id']}")
    assert (seen.json()["status"], seen.headers["crater-standby"]) == ("allocated", "true")
    assert int(seen.headers["crater-revision"]) >= task["revision"]
    assert "crater-standby" not in api.http.get("/v1/nodes").headers
    assert [found["id"] for found in other.get("/v1/tasks", label="x=y")["tasks"]] == [task["id"]]
    assert [node["name"] for node in other.get("/v1/nodes")["nodes"]] == ["n1"]
    refused = other.http.post("/v1/tasks", json={"name": "job", "command": ["true"]})
    assert (refused.status_code, refused.json()["type"], refused.json()["leader"]) == (421, "urn:crater:not_leader", leader.url)
    assert FakeAgent(standby.url, "n1").heartbeat().status_code == 421
    assert other.get("/v1/leader") == {**api.get("/v1/leader"), "leading": False}
    assert other.http.get("/ready").status_code == 200
    with CraterClient(standby.url) as client:
        assert client.submit({"name": "by-the-standby", "command": ["true"]}).name == "by-the-standby"


def test_a_clean_stop_hands_the_lead_over_at_once(start: Start) -> None:
    leader, standby = start("a", leader_lease="60s"), start("b", leader_lease="60s")
    agent = FakeAgent(leader.url, "n1")
    term = agent.register()["term"]
    task = Api(leader.url).submit(key="once")
    lease = agent.lease_of(task["id"])
    began = time.monotonic()
    assert leader.stop() == 0
    wait_until(lambda: leads(standby), 10)
    assert time.monotonic() - began < 10  # Of a lease of sixty.
    moved = FakeAgent(standby.url, "n1")
    assert moved.heartbeat().status_code == 404  # It must register with its new leader.
    assert moved.register()["term"] > term
    assert moved.lease_of(task["id"]) == lease
    assert Api(standby.url).submit(key="once")["id"] == task["id"]
    assert moved.report(lease, "running") == []


def test_a_killed_leader_is_followed_within_its_lease_and_stands_by_when_it_returns(start: Start) -> None:
    leader, standby = start("a"), start("b")
    FakeAgent(leader.url, "n1").register()
    acknowledged = [Api(leader.url).submit()["id"] for _ in range(20)]
    leader.kill()
    began = time.monotonic()
    wait_until(lambda: leads(standby), 20)
    assert time.monotonic() - began < LEASE_S + 4  # etcd looks at its leases twice a second; the rest is a busy machine.
    api = Api(standby.url)
    assert {task["id"] for task in api.get("/v1/tasks", limit=1000)["tasks"]} == set(acknowledged)
    assert api.get("/v1/nodes/n1")["status"] == "ready"  # It has its whole time to be heard by the new leader.
    leader.start()
    assert Api(leader.url).get("/v1/leader") == {**api.get("/v1/leader"), "leading": False}


def test_a_leader_that_was_paused_changes_nothing_when_it_wakes(start: Start) -> None:
    leader, standby = start("a"), start("b")
    agent = FakeAgent(leader.url, "n1")
    agent.register()
    task = Api(leader.url).submit()
    lease = agent.lease_of(task["id"])
    os.kill(leader.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: leads(standby), 20)
        moved, api = FakeAgent(standby.url, "n1"), Api(standby.url)
        moved.register()
        moved.report(lease, "running")
    finally:
        os.kill(leader.pid, signal.SIGCONT)
    statuses = {agent.heartbeat().status_code, agent.http.get("/leases").status_code}
    statuses.add(Api(leader.url).http.post("/v1/tasks", json={"name": "late", "command": ["true"]}).status_code)
    assert statuses <= {421, 503}
    wait_until(lambda: Api(leader.url).http.post(f"/v1/tasks/{task['id']}/cancel").status_code == 421, 5)
    assert api.task(task["id"])["status"] == "running"
    assert [found["id"] for found in api.get("/v1/tasks")["tasks"]] == [task["id"]]
    assert leads(standby)
