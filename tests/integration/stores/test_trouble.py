"""A store server that goes away: writes are refused with the reason, what runs goes on, and work resumes by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from callers import Api, FakeAgent
from harness import SchedulerProcess, start_scheduler, wait_until
from servers import PostgresServer, etcd_cluster


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    server = PostgresServer().start()
    yield server
    server.remove()


def test_postgres_that_is_restarted_costs_nothing(tmp_path: Path, own: list[SchedulerProcess], postgres: PostgresServer) -> None:
    scheduler = start_scheduler(tmp_path, database_url=postgres.database())
    own.append(scheduler)
    agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    agent.register()
    task = api.submit(key="before")
    lease = agent.lease_of(task["id"])
    agent.report(lease, "running")
    postgres.stop()
    body = {"name": "job", "command": ["true"]}
    began = time.monotonic()
    refused = api.http.post("/v1/tasks", json=body, headers={"Idempotency-Key": "during"})
    assert (refused.status_code, refused.json()["type"]) == (503, "urn:crater:store_unavailable")
    assert "PostgreSQL at 127.0.0.1" in refused.json()["detail"]
    assert time.monotonic() - began < 5
    assert api.get("/health")["status"] == "store_unavailable"
    assert agent.leases()["leases"] == [{**lease, "started": True}]  # Nobody tells the agent to stop anything.
    postgres.start()
    wait_until(lambda: api.get("/health")["status"] == "ok", 15, "the end of the trouble to be noticed without a caller")
    assert api.submit(key="before")["id"] == task["id"]
    assert api.submit(key="during")["status"] == "allocated"
    assert agent.report(lease, "succeeded", exit_code=0) == []
    scheduler.kill()
    scheduler.start()
    assert api.task(task["id"])["status"] == "succeeded"
    assert api.whats(task["id"]) == ["queued", "allocated", "started", "succeeded"]


def test_etcd_without_a_quorum_costs_nothing(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    members = etcd_cluster(3)
    try:
        scheduler = start_scheduler(tmp_path, etcd_endpoints=[member.url for member in members], leader_lease="3s")
        own.append(scheduler)
        agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
        agent.register()
        task = api.submit(key="before")
        lease = agent.lease_of(task["id"])
        agent.report(lease, "running")
        members[0].kill()
        assert api.submit()["status"] == "allocated"  # Two of three are enough.
        members[1].kill()
        body = {"name": "job", "command": ["true"]}
        refused = api.http.post("/v1/tasks", json=body, headers={"Idempotency-Key": "during"})
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:crater:store_unavailable")
        # It is heard, and told nothing that it could take for an order, for longer than the lead was certain.
        wait_until(lambda: agent.heartbeat().status_code == 503, 15)
        assert api.get("/health")["status"] == "store_unavailable"
        assert api.task(task["id"])["status"] == "running"  # Reads go on.
        members[1].start()
        wait_until(lambda: api.http.post("/v1/tasks", json=body, headers={"Idempotency-Key": "during"}).is_success, 30)
        wait_until(lambda: agent.http.post("/register", json=agent.declaration).is_success, 15)
        assert agent.report(lease, "succeeded", exit_code=0) == []
        assert api.submit(key="before")["id"] == task["id"]
        assert api.whats(task["id"]) == ["queued", "allocated", "started", "succeeded"]
    finally:
        for member in members:
            member.remove()
