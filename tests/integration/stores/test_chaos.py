"""Real processes are killed, paused and cut off while short tasks run: what each task did itself shows that it ran once, or once
for each attempt that was counted, and never beside itself."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_harness import AgentProcess, start_agent
from far_node import FarNode
from harness import SchedulerProcess, free_port, start_scheduler, wait_until

from crater_core.client import CraterClient
from crater_core.service.auth import hash_of, new_token

TASKS = 300
STEP = TASKS // 10
ADMIN, AGENT = new_token(), new_token()
TOKENS = [{"name": role, "role": role, "sha256": hash_of(token)} for role, token in (("admin", ADMIN), ("agent", AGENT))]
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
TICKING = 3
TIMING = {"leader_lease": "2s", "heartbeat_interval": "500ms", "heartbeat_timeout": "6s"}


@pytest.fixture(params=["etcd", "postgres"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "postgres":
        return {"database_url": request.getfixturevalue("postgres_server").database()}
    server = request.getfixturevalue("etcd_server")
    return {"etcd_endpoints": [server.url], "etcd_prefix": f"/{tmp_path.name}/"}


@pytest.fixture
def far() -> Iterator[FarNode | None]:
    """None for an ordinary user, who may not make networks: the rest of the chaos is theirs as well."""
    node = FarNode() if os.geteuid() == 0 else None
    yield node
    if node is not None:
        node.close()


@pytest.fixture
def schedulers(
    shared: dict[str, Any], far: FarNode | None, tmp_path: Path, own: list[SchedulerProcess]
) -> list[SchedulerProcess]:
    address = far.near_address if far is not None else "127.0.0.1"
    for name in ("a", "b"):
        own.append(start_scheduler(tmp_path / name, listen=f"{address}:{free_port()}", tokens=TOKENS, **TIMING, **shared))
    return own


@pytest.fixture
def start_node(schedulers: list[SchedulerProcess], place: Path) -> Iterator[Callable[..., AgentProcess]]:
    endpoints = [scheduler.url for scheduler in schedulers]
    started: list[AgentProcess] = []

    def start(name: str, prefix: tuple[str, ...] = ()) -> AgentProcess:
        started.append(start_agent(place, endpoints[0], name, prefix=prefix, token=AGENT, scheduler_endpoint=endpoints))
        return started[-1]

    yield start
    for agent in started:
        agent.stop()


def the_leader(schedulers: list[SchedulerProcess]) -> SchedulerProcess:
    def found() -> SchedulerProcess | None:
        for scheduler in schedulers:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{scheduler.url}/v1/leader", headers=HEADERS, timeout=1).json()["leading"]:
                    return scheduler
        return None

    return wait_until(found, 30, "a leader")


class Work:
    """The tasks of this test, and what each of them wrote. O_APPEND keeps lines whole."""

    def __init__(self, client: CraterClient, record: Path) -> None:
        self.client, self.record = client, record
        self.short: list[str] = []
        self.ticking: list[str] = []

    def submit(self, count: int) -> None:
        """One line in a file of its own for each time that the task's program begins."""
        for _ in range(count):
            name = f"job-{len(self.short)}"
            self.short.append(self._submit(name, f'echo "$CRATER_ATTEMPT" >> {self.record}/{name}; sleep 0.3'))

    def submit_ticking(self) -> None:
        """A line every 20 ms, until all of them may end."""
        name = f"ticking-{len(self.ticking)}"
        tick = f'echo "$CRATER_ATTEMPT" >> {self.record}/{name}; sleep 0.02'
        self.ticking.append(self._submit(name, f"while [ ! -e {self.record}/end ]; do {tick}; done"))

    def _submit(self, name: str, script: str) -> str:
        task = {"name": name, "command": ["sh", "-c", script], "retry": {"backoff": "1ms"}, "grace": "100ms"}
        task["resources"] = {"cpu": 0.25, "memory": "32MiB"}
        return self.client.submit(task, idempotency_key=name).id

    def lines(self, name: str) -> list[int]:
        return [int(line) for line in (self.record / name).read_text().split()]

    def let_end(self) -> None:
        (self.record / "end").touch()


@pytest.mark.timeout(240)
def test_every_task_runs_once_for_each_attempt_whoever_is_killed_paused_or_cut_off(
    schedulers: list[SchedulerProcess], start_node: Callable[..., AgentProcess], far: FarNode | None, place: Path
) -> None:
    record = place / "record"
    record.mkdir()
    record.chmod(0o777)
    with CraterClient([scheduler.url for scheduler in schedulers], retry_for_s=60, token=ADMIN) as client:
        work = Work(client, record)
        agents = [start_node("far", far.prefix if far is not None else ())]
        wait_until(client.nodes, 60, "the far node")
        for _ in range(TICKING):
            work.submit_ticking()
        wait_until(lambda: {client.task(task).status for task in work.ticking} == {"running"}, 30, "all tick")
        agents += [start_node("n1"), start_node("n2")]
        wait_until(lambda: len(client.nodes()) == 3, 60, "three nodes")

        def kill_the_leader() -> None:
            leader = the_leader(schedulers)
            leader.kill()
            work.submit(STEP)
            leader.start()

        def pause_the_leader() -> None:
            leader = the_leader(schedulers)
            os.kill(leader.pid, signal.SIGSTOP)
            try:
                others = [scheduler for scheduler in schedulers if scheduler is not leader]
                work.submit(STEP)
                the_leader(others)
            finally:
                os.kill(leader.pid, signal.SIGCONT)

        def kill_an_agent(agent: AgentProcess) -> None:
            agent.kill()
            work.submit(STEP)
            agent.restart()

        def cut_the_far_node_off(wire: FarNode) -> None:
            wire.cut()
            work.submit(STEP)
            moved = lambda: all((task := client.task(one)).status == "running" and task.attempt > 1 for one in work.ticking)  # noqa: E731
            wait_until(moved, 30, "what ticked there ticks elsewhere")
            wire.mend()
            wait_until(lambda: {node.status for node in client.nodes()} == {"ready"}, 30, "the far node is back")

        work.submit(STEP)
        kill_the_leader()
        kill_an_agent(agents[1])
        pause_the_leader()
        if far is not None:
            cut_the_far_node_off(far)
        kill_the_leader()
        kill_an_agent(agents[1])
        kill_the_leader()
        work.submit(TASKS - len(work.short))
        work.let_end()
        wait_until(lambda: all(task["ended_at_ms"] for task in _tasks(schedulers)), 90, "every task to end")
        tasks = {task["id"]: task for task in _tasks(schedulers)}
        assert sorted(tasks) == sorted(work.short + work.ticking)
        assert Counter(task["status"] for task in tasks.values()) == {"succeeded": TASKS + TICKING}
        for number, task in enumerate(work.short):
            lines, attempts = work.lines(f"job-{number}"), tasks[task]["attempt"]
            assert lines == sorted(set(lines)), f"job-{number} ran in attempts {lines} of {attempts}"
            assert lines[-1] == attempts
        for number, task in enumerate(work.ticking):
            lines = work.lines(f"ticking-{number}")
            assert lines == sorted(lines), f"ticking-{number}: one ended before the next began"
            assert lines[-1] == tasks[task]["attempt"]
            assert (tasks[task]["attempt"] > 1) is (far is not None), "moved by the cut alone: nothing else stops a running task"
        assert all(node.allocations == 0 for node in client.nodes())
        assert {agent.process.poll() for agent in agents} == {None}


def _tasks(schedulers: list[SchedulerProcess]) -> list[dict[str, Any]]:
    answer = httpx.get(f"{the_leader(schedulers).url}/v1/tasks", params={"limit": 1000}, headers=HEADERS, timeout=20)
    return answer.json()["tasks"] if answer.status_code == 200 else [{"id": "", "status": "unknown", "ended_at_ms": None}]
