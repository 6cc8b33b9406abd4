"""Real processes are killed and paused while short tasks run: what each task did itself shows that it ran once, or once for each
attempt that was counted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_harness import AgentProcess, start_agent
from harness import SchedulerProcess, start_scheduler, wait_until

from crater_core.client import CraterClient

TASKS = 120
TIMING = {"leader_lease": "2s", "heartbeat_interval": "500ms", "heartbeat_timeout": "6s"}


@pytest.fixture(params=["etcd", "postgres"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "postgres":
        return {"database_url": request.getfixturevalue("postgres_server").database()}
    server = request.getfixturevalue("etcd_server")
    return {"etcd_endpoints": [server.url], "etcd_prefix": f"/{tmp_path.name}/"}


@pytest.fixture
def place() -> Iterator[Path]:
    """Short, and open to the users that workloads run as."""
    path = Path(tempfile.mkdtemp(prefix="crater-chaos-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def schedulers(shared: dict[str, Any], tmp_path: Path, own: list[SchedulerProcess]) -> list[SchedulerProcess]:
    own += [start_scheduler(tmp_path / name, **TIMING, **shared) for name in ("a", "b")]
    return own


@pytest.fixture
def agents(schedulers: list[SchedulerProcess], place: Path) -> Iterator[list[AgentProcess]]:
    endpoints = [scheduler.url for scheduler in schedulers]
    started = [start_agent(place, endpoints[0], f"n{n}", scheduler_endpoint=endpoints) for n in (1, 2, 3)]
    yield started
    for agent in started:
        agent.stop()


def the_leader(schedulers: list[SchedulerProcess]) -> SchedulerProcess:
    def found() -> SchedulerProcess | None:
        for scheduler in schedulers:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{scheduler.url}/v1/leader", timeout=1).json()["leading"]:
                    return scheduler
        return None

    return wait_until(found, 30, "a leader")


@pytest.mark.timeout(240)
def test_every_task_runs_once_for_each_attempt_whoever_is_killed(
    schedulers: list[SchedulerProcess], agents: list[AgentProcess], place: Path
) -> None:
    record = place / "record"
    record.mkdir()
    record.chmod(0o777)
    with CraterClient([scheduler.url for scheduler in schedulers], retry_for_s=60) as client:
        wait_until(lambda: len(client.nodes()) == 3, 60, "three nodes")
        ids: list[str] = []

        def submit(count: int) -> None:
            """One line in a file of its own for each time that the task's program begins: O_APPEND keeps lines whole."""
            for _ in range(count):
                number = len(ids)
                script = f'echo "$CRATER_ATTEMPT" >> {record}/{number}; sleep 0.3'
                task = {"name": f"job-{number}", "command": ["sh", "-c", script], "retry": {"backoff": "1ms"}}
                task["resources"] = {"cpu": 0.5, "memory": "32MiB"}
                ids.append(client.submit(task, idempotency_key=f"job-{number}").id)

        def kill_the_leader() -> None:
            leader = the_leader(schedulers)
            leader.kill()
            submit(TASKS // 8)
            leader.start()

        def pause_the_leader() -> None:
            leader = the_leader(schedulers)
            os.kill(leader.pid, signal.SIGSTOP)
            try:
                others = [scheduler for scheduler in schedulers if scheduler is not leader]
                submit(TASKS // 8)
                the_leader(others)
            finally:
                os.kill(leader.pid, signal.SIGCONT)

        def kill_an_agent(agent: AgentProcess) -> None:
            agent.kill()
            submit(TASKS // 8)
            agent.restart()

        submit(TASKS // 8)
        kill_the_leader()
        kill_an_agent(agents[0])
        pause_the_leader()
        kill_the_leader()
        kill_an_agent(agents[1])
        kill_the_leader()
        submit(TASKS - len(ids))

        def ended() -> bool:
            return all(task["status"] in ("succeeded", "failed", "cancelled") for task in _tasks(client, schedulers))

        wait_until(ended, 90, "every task to end")
        tasks = {task["id"]: task for task in _tasks(client, schedulers)}
        assert sorted(tasks) == sorted(ids)
        assert Counter(task["status"] for task in tasks.values()) == {"succeeded": TASKS}
        for number, task_id in enumerate(ids):
            lines = (record / str(number)).read_text().split()
            attempts = tasks[task_id]["attempt"]
            assert len(lines) == len(set(lines)) <= attempts, f"job-{number}: ran in attempts {lines} of {attempts}"
            assert lines[-1] == str(attempts)
        assert all(node.allocations == 0 for node in client.nodes())
        assert {agent.process.poll() for agent in agents} == {None}


def _tasks(client: CraterClient, schedulers: list[SchedulerProcess]) -> list[dict[str, Any]]:
    answer = httpx.get(f"{the_leader(schedulers).url}/v1/tasks", params={"limit": 1000}, timeout=20)
    return answer.json()["tasks"] if answer.status_code == 200 else [{"id": "", "status": "unknown"}]
