"""The scheduler is killed, paused, stopped and starved; what it has acknowledged stays true."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from harness import SchedulerProcess, start_scheduler, wait_until

from .conftest import Api, FakeAgent

QUICK = {"heartbeat_interval": "200ms", "heartbeat_timeout": "800ms"}


def test_every_acknowledged_submit_survives_kill_9(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    acknowledged: list[str] = []

    def submit_until_it_dies(number: int) -> None:
        with httpx.Client(base_url=scheduler.url, timeout=5) as client:
            for n in range(10_000):
                try:
                    answer = client.post("/v1/tasks", json={"name": f"job-{number}-{n}", "command": ["true"]})
                except httpx.HTTPError:
                    return
                if answer.status_code == 201:
                    acknowledged.append(answer.json()["id"])

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(submit_until_it_dies, number) for number in range(4)]
        wait_until(lambda: len(acknowledged) > 50, 30)
        scheduler.kill()
        for each in running:
            each.result()
    scheduler.start()
    api = Api(scheduler.url)
    there: set[str] = set()
    cursor: dict[str, Any] = {}
    while True:
        page = api.get("/v1/tasks", limit=1000, **cursor)
        there |= {task["id"] for task in page["tasks"]}
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert set(acknowledged) <= there


def test_a_task_in_the_middle_of_its_run_finishes_after_kill_9(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    first = agent.register()
    task = api.submit(key="once")
    lease = agent.lease_of(task["id"])
    agent.report(lease, "running")
    scheduler.kill()
    scheduler.start()
    assert agent.heartbeat().status_code == 404  # "Register again": it does not know the agent's secret any more.
    assert agent.register()["term"] > first["term"]
    assert agent.lease_of(task["id"]) == {**lease, "started": True}
    assert api.submit(key="once")["id"] == task["id"]
    assert agent.report(lease, "succeeded", exit_code=0) == []
    assert api.task(task["id"])["status"] == "succeeded"
    assert api.whats(task["id"]) == ["queued", "allocated", "started", "succeeded"]
    scheduler.restart()
    assert api.task(task["id"])["core_hours"] > 0
    assert _first_events(scheduler.url, 4) == ["queued", "allocated", "started", "succeeded"]


def _first_events(url: str, count: int) -> list[str]:
    """Of the task, from the beginning of the history, which only the store remembers now."""
    seen: list[str] = []
    with httpx.stream("GET", f"{url}/v1/events?subject=task", headers={"Last-Event-ID": "0"}, timeout=20) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: "))["what"])
            if len(seen) == count:
                break
    return seen


def test_a_silent_node_is_lost_and_its_task_runs_elsewhere(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path, **QUICK)
    own.append(scheduler)
    quiet, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    quiet.register()
    kept = api.submit(retry={"on_node_loss": False})
    moved = api.submit(retry={"backoff": "1ms"})
    old = quiet.lease_of(moved["id"])
    for task in (kept, moved):
        quiet.report(quiet.lease_of(task["id"]), "running")
    alive = FakeAgent(scheduler.url, "n2")
    alive.register()

    def placed_again() -> bool:
        alive.heartbeat()
        return api.task(moved["id"])["node"] == "n2"

    wait_until(placed_again, 8)  # Well before the look that comes every ten seconds in any case.
    assert api.get("/v1/nodes/n1")["status"] == "lost"
    assert api.task(moved["id"])["attempt"] == 2
    # What will not be started elsewhere stays with its node, and is taken back when the node returns.
    assert (api.task(kept["id"])["status"], api.task(kept["id"])["reason"]["code"]) == ("running", "node_lost")
    assert quiet.report(old, "succeeded", exit_code=0) == [old["allocation"]]
    assert [lease["task"] for lease in quiet.leases()["leases"]] == [kept["id"]]
    assert api.task(kept["id"])["reason"] is None
    assert api.get("/v1/nodes/n1")["status"] == "ready"


def test_a_node_that_stays_away_is_forgotten_with_what_it_held(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path, **QUICK, node_forget_after="1200ms")
    own.append(scheduler)
    agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    agent.register()
    task = api.submit(retry={"on_node_loss": False})
    agent.report(agent.lease_of(task["id"]), "running")
    wait_until(lambda: api.get("/v1/nodes")["nodes"] == [], 10)
    ended = api.task(task["id"])
    assert (ended["status"], ended["reason"]["code"]) == ("failed", "node_lost")
    assert api.get("/v1/usage")["rows"][0]["core_hours"] > 0


def test_a_scheduler_that_just_started_gives_every_node_its_whole_time(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path, heartbeat_interval="500ms", heartbeat_timeout="2s")
    own.append(scheduler)
    agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    agent.register()
    scheduler.kill()
    time.sleep(2.2)
    scheduler.start()
    began = time.monotonic()
    assert api.get("/v1/nodes/n1")["status"] == "ready"
    wait_until(lambda: api.get("/v1/nodes/n1")["status"] == "lost", 10)
    assert time.monotonic() - began > 1.2


def test_a_scheduler_that_was_paused_blames_itself_first(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path, heartbeat_interval="500ms", heartbeat_timeout="2s")
    own.append(scheduler)
    agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    agent.register()
    os.kill(scheduler.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(scheduler.pid, signal.SIGCONT)
    api.get("/health")
    time.sleep(0.5)
    assert api.get("/v1/nodes/n1")["status"] == "ready"


def test_a_store_that_cannot_be_written_refuses_and_works_again(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    api, agent = Api(scheduler.url), FakeAgent(scheduler.url, "n1")
    agent.register()
    before = api.submit()
    lease = agent.lease_of(before["id"])
    # No file of the process may grow beyond what it has: as on a full disk.
    size = scheduler.database.with_name("crater.db-wal").stat().st_size
    hard = resource.prlimit(scheduler.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(scheduler.pid, resource.RLIMIT_FSIZE, (size, hard))
    body = {"name": "job", "command": ["echo", "x" * 20_000]}
    answer = api.http.post("/v1/tasks", json=body, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:crater:store_unavailable")
    assert answer.json()["retryable"] is True
    assert agent.http.post(
        "/reports", json={"reports": [{"allocation": lease["allocation"], "token": lease["token"], "status": "running"}]}
    ).status_code in (200, 503)
    assert len(api.get("/v1/tasks")["tasks"]) == 1  # Reads go on, and nothing half-done is seen.
    assert api.get("/health")["status"] == "store_unavailable"
    resource.prlimit(scheduler.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_until(lambda: api.get("/health")["status"] == "ok", 10, "the end of the trouble to be noticed without a caller")
    answer = api.http.post("/v1/tasks", json=body, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()["status"]) == (201, "allocated")
    assert api.get("/health")["status"] == "ok"
    scheduler.kill()
    scheduler.start()
    assert len(api.get("/v1/tasks")["tasks"]) == 2


def test_a_locked_store_refuses_and_works_again(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    api = Api(scheduler.url)
    api.submit()
    other = sqlite3.connect(scheduler.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = api.http.post("/v1/tasks", json={"name": "job", "command": ["true"]})
    assert (answer.status_code, "locked" in answer.json()["detail"]) == (503, True)
    other.execute("ROLLBACK")
    other.close()
    assert api.submit()["status"] == "queued"
    assert len(api.get("/v1/tasks")["tasks"]) == 2


def test_it_stops_within_two_seconds_with_long_polls_open(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    agent, api = FakeAgent(scheduler.url, "n1"), Api(scheduler.url)
    agent.register()
    revision = agent.leases()["revision"]
    answers: list[int] = []

    def poll() -> None:
        answers.append(agent.http.get("/leases", params={"after": revision, "wait": 60}).status_code)

    def watch() -> None:
        with httpx.stream("GET", f"{scheduler.url}/v1/events", timeout=60) as answer:
            for _ in answer.iter_lines():
                pass
            answers.append(answer.status_code)

    threads = [threading.Thread(target=call) for call in (poll, watch)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    assert api.get("/health")["status"] == "ok"
    began = time.monotonic()
    assert scheduler.stop() == 0
    assert time.monotonic() - began < 2
    for thread in threads:
        thread.join(5)
    assert answers == [200, 200]


def test_metrics_tell_the_state(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    scheduler = start_scheduler(tmp_path)
    own.append(scheduler)
    FakeAgent(scheduler.url, "n1", cpu=4).register()
    api = Api(scheduler.url)
    api.submit(resources={"cpu": 3})
    api.submit(resources={"cpu": 3})
    text = httpx.get(scheduler.metrics_url).text
    for line in (
        "crater_queue_length 1.0",
        'crater_tasks{status="allocated"} 1.0',
        'crater_waiting_tasks{reason="no_room"} 1.0',
        'crater_nodes{cordoned="false",status="ready"} 1.0',
        'crater_pool_free{kind="cpu",pool="n1-cpu",resource="cpu_cores"} 1.0',
        'crater_http_requests_total{method="POST",route="/v1/tasks",status="201"} 2.0',
        "crater_store_available 1.0",
    ):
        assert line in text
    assert "crater_commit_seconds_count" in text
