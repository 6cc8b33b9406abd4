"""One scheduler and many: a thousand agents that beat, a long queue while a hundred work, and a restart with 100,000 tasks.

The agents are simulated ones, on real connections and on the same machine; the scheduler is the real process.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import urllib.request
from collections.abc import Generator
from pathlib import Path

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.agents import Agents
from benchmarks.figures import Figure, at_most, percentile, plain
from benchmarks.recovery import TARGET_S, median_recovery_s
from crater_core.client import CraterClient
from example_pipelines.demo.cluster import answers
from example_pipelines.demo.machine import free_ports
from example_pipelines.demo.processes import Processes, program

MANY, MANY_S = 1_000, 40.0
"""Agents that have nothing to do, and for how long they are watched: four beats each."""
SOME, SOME_S, QUEUED, RUN_S = 100, 40.0, 10_000, 60.0
"""Agents that work, tasks that wait, and how long each runs."""
MIB = 1024**2


def rows() -> list[Figure]:
    return [*_many_agents(), *_long_queue(), _recovery()]


def _many_agents() -> list[Figure]:
    with _a_scheduler() as scheduler:
        share, beats_ms = asyncio.run(_beating(scheduler))
    p99 = percentile(beats_ms, 99)
    return [
        at_most("scale.agents_1000.core_percent", share, "% of a core", 50),
        at_most("scale.agents_1000.heartbeat_p99_ms", p99, "ms", 50),
    ]


def _long_queue() -> list[Figure]:
    with _a_scheduler() as scheduler:
        with CraterClient(scheduler.url) as client:
            task = {"name": "queued", "command": ("/bin/true",), "resources": {"cpu": 1, "memory": "1GiB"}}
            for _ in range(QUEUED // 1_000 + SOME * 8 // 1_000 + 1):
                client.submit_many([task] * 1_000)
        per_s, beats_ms = asyncio.run(_working(scheduler))
        memory_mb = scheduler.process.memory_info().rss / MIB
        cycle_p99_ms = scheduler.cycle_ms(0.99)
    return [
        plain("scale.queue_10k.ended_per_s", per_s, "tasks/s"),
        plain("scale.queue_10k.memory_mb", memory_mb, "MB"),
        plain("scale.queue_10k.heartbeat_p99_ms", percentile(beats_ms, 99), "ms"),
        plain("scale.queue_10k.cycle_p99_ms", cycle_p99_ms, "ms, at most"),
    ]


def _recovery() -> Figure:
    return at_most("scale.recovery", median_recovery_s(), "s", TARGET_S)


class Scheduler:
    """A scheduler process with nothing beside it."""

    def __init__(self, port: int, metrics_port: int, process: psutil.Process) -> None:
        self.port, self.process = port, process
        self.url = f"http://127.0.0.1:{port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def cycle_ms(self, quantile: float) -> float:
        """The bound of the histogram's step in which this quantile of all cycles lies."""
        with urllib.request.urlopen(self._metrics_url, timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        (cycles,) = [family for family in families if family.name == "crater_cycle_seconds"]
        steps = [(float(one.labels["le"]), one.value) for one in cycles.samples if one.name.endswith("_bucket")]
        wanted = quantile * max(count for _, count in steps)
        return 1000 * min(bound for bound, count in steps if count >= wanted)


@contextlib.contextmanager
def _a_scheduler() -> Generator[Scheduler]:
    port, metrics = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="crater-bench-") as name:
        home = Path(name)
        config = {"listen": f"127.0.0.1:{port}", "data_dir": str(home), "metrics": {"enabled": True, "port": metrics}}
        (home / "scheduler.yaml").write_text(yaml.safe_dump({**config, "log": {"level": "warning"}}))
        processes = Processes(home, {})
        try:
            running = processes.start("scheduler", [program("crater-scheduler"), "--config", str(home / "scheduler.yaml")])
            processes.wait_until("the scheduler", lambda: bool(answers(f"http://127.0.0.1:{port}/health")), 30)
            yield Scheduler(port, metrics, psutil.Process(running.process.pid))
        finally:
            processes.stop_all()


async def _beating(scheduler: Scheduler) -> tuple[float, list[float]]:
    agents = Agents("127.0.0.1", scheduler.port, MANY)
    try:
        await agents.start()
        await asyncio.sleep(5)  # What registering has stirred up has settled.
        agents.begin()
        before_s = scheduler.cpu_s()
        await asyncio.sleep(MANY_S)
        agents.check()
        return 100 * (scheduler.cpu_s() - before_s) / MANY_S, agents.beats_ms
    finally:
        await agents.stop()


async def _working(scheduler: Scheduler) -> tuple[float, list[float]]:
    agents = Agents("127.0.0.1", scheduler.port, SOME, RUN_S)
    try:
        await agents.start()
        await asyncio.sleep(5)
        agents.begin()
        await asyncio.sleep(SOME_S)
        agents.check()
        return agents.ended / SOME_S, agents.beats_ms
    finally:
        await agents.stop()
