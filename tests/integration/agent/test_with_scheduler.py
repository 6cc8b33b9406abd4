"""A real agent and a real scheduler: what a submit becomes, through crashes of either."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_harness import AgentProcess, poll_until, start_agent
from harness import SchedulerProcess, start_scheduler


class Cluster:
    """One scheduler, one agent, and the few calls that these tests make."""

    def __init__(self, place: Path) -> None:
        self.scheduler: SchedulerProcess = start_scheduler(place, heartbeat_interval="1s", heartbeat_timeout="4s")
        self.agent: AgentProcess = start_agent(place, self.scheduler.url)
        self.client = httpx.Client(base_url=self.scheduler.url, trust_env=False, timeout=70)
        poll_until(lambda: self.client.get("/v1/nodes").json()["nodes"], what="the node registered")

    def submit(self, *command: str, **fields: Any) -> str:
        body = {"name": "t", "project": "p", "command": list(command), "resources": {"cpu": 0.5, "memory": "128MiB"}, **fields}
        answer = self.client.post("/v1/tasks", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def task(self, task: str) -> dict[str, Any]:
        return self.client.get(f"/v1/tasks/{task}").json()

    def until(self, task: str, *statuses: str, timeout_s: float = 20) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            try:
                found = self.task(task)
            except httpx.TransportError:
                return None
            return found if found["status"] in statuses else None

        found = poll_until(there, timeout_s, f"{task} {statuses}")
        assert found is not None
        return found

    def end(self, task: str, timeout_s: float = 20) -> dict[str, Any]:
        return self.until(task, "succeeded", "failed", "cancelled", timeout_s=timeout_s)

    def log(self, task: str) -> str:
        answer = self.client.get(f"/v1/tasks/{task}/logs", params={"stream": "stdout"})
        assert answer.status_code == 200, answer.text
        return answer.text


@pytest.fixture
def cluster(place: Path) -> Iterator[Cluster]:
    running = Cluster(place)
    yield running
    running.client.close()
    running.agent.stop()
    running.scheduler.kill()


def test_a_task_runs_and_its_output_and_end_are_there(cluster: Cluster):
    task = cluster.submit("sh", "-c", "echo hello; exit 4")
    end = cluster.end(task)
    assert (end["status"], end["exit_code"], end["node"], end["reason"]["code"]) == ("failed", 4, "n1", "exit_code")
    assert cluster.log(task) == "hello\n"


def test_more_memory_than_asked_for_reaches_the_submitter_with_numbers(cluster: Cluster):
    task = cluster.submit(sys.executable, "-c", "x = [bytearray(4 << 20) for _ in range(100)]; import time; time.sleep(20)")
    reason = cluster.end(task)["reason"]
    assert reason["code"] in ("oom_killed", "memory_exceeded")
    assert reason["facts"]["limit_bytes"] == 128 * 1024**2
    assert "128 MiB" in reason["message"]


def test_a_cancel_reaches_the_process(cluster: Cluster):
    task = cluster.submit("sh", "-c", "echo $$; exec sleep 600")
    cluster.until(task, "running")
    pid = int(poll_until(lambda: cluster.log(task)))
    cluster.client.post(f"/v1/tasks/{task}/cancel", json={})
    assert cluster.end(task)["reason"]["code"] == "cancelled"
    assert not Path(f"/proc/{pid}").exists()


def test_a_scheduler_that_is_killed_and_comes_back_finds_the_task_running_and_its_end(cluster: Cluster, place: Path):
    going = cluster.submit("sh", "-c", f"echo x >> {place}/ran; until [ -e {place}/go ]; do sleep 0.05; done")
    ended = cluster.submit("sh", "-c", f"echo x >> {place}/ran; sleep 1; touch {place}/ended; exit 6")
    cluster.until(going, "running")
    cluster.until(ended, "running")
    cluster.scheduler.kill()
    poll_until((place / "ended").exists)
    cluster.scheduler.start()
    assert cluster.end(ended)["exit_code"] == 6
    assert cluster.until(going, "running")["attempt"] == 1
    (place / "go").touch()
    assert cluster.end(going)["status"] == "succeeded"
    assert (place / "ran").read_text() == "x\nx\n"


def test_an_agent_that_is_killed_and_comes_back_in_time_costs_nothing(cluster: Cluster, place: Path):
    task = cluster.submit("sh", "-c", f"echo x >> {place}/ran; until [ -e {place}/go ]; do sleep 0.05; done; exit 3")
    cluster.until(task, "running")
    cluster.agent.kill()
    (place / "go").touch()
    cluster.agent.restart()
    end = cluster.end(task)
    assert (end["exit_code"], end["attempt"]) == (3, 1)
    assert (place / "ran").read_text() == "x\n"


def test_an_agent_that_stays_away_loses_its_task_and_no_two_copies_run_at_once(cluster: Cluster, place: Path):
    task = cluster.submit("sh", "-c", f"echo $$ >> {place}/ran; trap '' TERM; while [ ! -e {place}/go ]; do sleep 0.05; done")
    cluster.until(task, "running")
    first = int(poll_until(lambda: (place / "ran").exists() and (place / "ran").read_text()))
    cluster.agent.kill()
    cluster.until(task, "queued")
    assert not Path(f"/proc/{first}").exists()
    cluster.agent.restart()
    second = cluster.until(task, "running")
    assert second["attempt"] == 2
    (place / "go").touch()
    assert cluster.end(task)["status"] == "succeeded"
    assert len((place / "ran").read_text().split()) == 2


def _drain(cluster: Cluster, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "crater_agent", "drain", "--config", str(cluster.agent.config_file), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_an_agent_is_drained_from_its_own_machine_and_no_task_is_stopped_for_it(cluster: Cluster, place: Path):
    go = place / "go"
    running = cluster.submit("sh", "-c", f"until [ -e {go} ]; do sleep 0.05; done; echo whole")
    cluster.until(running, "running")
    drain = _drain(cluster, "--wait", "--reason", "new disk")
    assert drain.stdout is not None
    assert drain.stdout.readline() == "n1 is draining: 1 allocation goes on to the end, and nothing new is sent to it\n"
    node = cluster.client.get("/v1/nodes/n1").json()
    assert (node["cordoned"], node["drain"]["reason"], node["drain"]["deadline_ms"]) == (True, "new disk", None)
    waiting = cluster.submit("true")
    assert cluster.task(waiting)["status"] == "queued"
    assert cluster.task(running)["status"] == "running"
    go.touch()
    assert cluster.end(running)["status"] == "succeeded"
    assert cluster.log(running) == "whole\n"
    assert drain.communicate(timeout=20)[0] == "n1 is drained: nothing runs on it, and nothing new is sent to it\n"
    assert drain.returncode == 0
    assert cluster.task(waiting)["status"] == "queued"
    back = _drain(cluster, "--undo")
    assert back.communicate(timeout=20)[0] == "n1 takes tasks again\n"
    assert cluster.end(waiting)["status"] == "succeeded"


def test_a_drain_from_the_machine_leaves_an_operators_deadline_as_it_is(cluster: Cluster):
    cluster.client.post("/v1/nodes/n1/drain", json={"deadline": "2h", "reason": "moving"}).raise_for_status()
    before = cluster.client.get("/v1/nodes/n1").json()["drain"]
    assert before["reason"] == "moving"
    said = _drain(cluster, "--wait", "--reason", "other").communicate(timeout=20)[0]
    assert said == "n1 is drained: nothing runs on it, and nothing new is sent to it\n"
    assert cluster.client.get("/v1/nodes/n1").json()["drain"] == before


def test_who_waits_for_a_drain_hears_that_it_was_taken_back(cluster: Cluster):
    cluster.until(cluster.submit("sleep", "60"), "running")
    drain = _drain(cluster, "--wait")
    assert drain.stdout is not None
    assert drain.stdout.readline().startswith("n1 is draining")
    cluster.client.post("/v1/nodes/n1/uncordon").raise_for_status()
    assert "take tasks again meanwhile" in drain.communicate(timeout=20)[0]
    assert drain.returncode == 1


def test_a_drain_without_a_scheduler_or_with_an_unknown_node_fails_with_one_line(cluster: Cluster, place: Path):
    cluster.agent.config_file.write_text(cluster.agent.config_file.read_text().replace("node_name: n1", "node_name: n7"))
    drain = _drain(cluster)
    assert (drain.communicate(timeout=20)[0], drain.returncode) == ("crater-agent drain: no node is called n7\n", 1)
    cluster.scheduler.kill()
    drain = _drain(cluster)
    said = drain.communicate(timeout=20)[0]
    assert said.startswith("crater-agent drain: ")
    assert (said.count("\n"), drain.returncode) == (1, 1)
