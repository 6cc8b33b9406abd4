"""What watching GPUs costs an agent, how soon a task with a share of one starts, and how soon one that takes too much is stopped.

The GPUs are those of the NVML stand-in of the tests, eight of them, each with two tasks: the agent, pynvml and the processes are
real. The stand-in reads its file at every call, so a real driver may take more or less time than it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import cost
from benchmarks.cluster import NODE, Cluster, a_cluster
from benchmarks.figures import Figure, at_most, median, plain
from benchmarks.tasks import DATE
from crater_core.client import CraterClient

CARDS = 8
TASKS = 2
SHARE_MIB = 10 * 1024
ROUNDS = 5
LATENCY_ROUNDS = 100
AGENT_KEYS = {
    "sample_interval": "5s",
    "simulated_gpus": None,
    "resource_pools": None,
    "gpu_sharing": {"enabled": True, "compute_mode": "time_slice"},
}


class Cards:
    """The cards of the stand-in, and what runs on them: by pid, the card's number and MiB."""

    def __init__(self, home: Path) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        self._nvml: Any = importlib.import_module("nvml")
        self._file = home / "gpus"
        self.environ: dict[str, str] = self._nvml.environ(self._nvml.build(home), self._file)
        self.show({})

    def show(self, processes: Mapping[int, tuple[int, int]]) -> None:
        cards = [self._nvml.gpu(f"GPU-{n}", bus=f"00000000:{n + 1:02x}:00.0", use=90) for n in range(CARDS)]
        taken = [self._nvml.process(f"GPU-{n}", pid, mib, 40) for pid, (n, mib) in processes.items()]
        self._nvml.write(self._file, [*cards, *taken])


def rows(home: Path) -> Iterator[Figure]:
    cards = Cards(home)
    with a_cluster(home, AGENT_KEYS, cards.environ) as cluster, CraterClient(cluster.url) as client:
        tasks = [_submit(client) for _ in range(CARDS * TASKS)]
        running = {_pid_of(cluster, client, task): (_card_of(client, task), SHARE_MIB // 2) for task in tasks}
        cards.show(running)
        percent, memory_mb = cost.of_agent(cluster)
        yield at_most("agent.gpus_8.cpu_percent", percent, "% of a core", 5.0)
        yield at_most("agent.gpus_8.rss_mb", memory_mb, "MB", 100.0)
        pairs = [(_start_ms(client, {"gpu": 0.1}), _start_ms(client, {})) for _ in range(LATENCY_ROUNDS + 10)][10:]
        with_gpu, without = (median(found) for found in zip(*pairs, strict=True))
        yield at_most("latency.gpu_task.ms", with_gpu, "ms", 5.0)
        yield plain("latency.gpu_task_added.ms", with_gpu - without, "ms")
        for id, mib, limit in (("over_share", SHARE_MIB * 11 // 10, 5_000), ("far_over_share", SHARE_MIB * 2, 2_000)):
            found = [_time_to_stop(cluster, client, cards, running, mib) for _ in range(ROUNDS)]
            yield at_most(f"gpu_memory.{id}_to_stop_ms", median(found), "ms", limit)


def _submit(client: CraterClient) -> str:
    body = {
        "name": "gpu",
        "command": ("sleep", "3600"),
        "resources": {"cpu": 0.05, "memory": "32MiB", "gpu_memory": f"{SHARE_MIB}MiB"},
    }
    return client.submit(body).id


def _start_ms(client: CraterClient, gpu: dict[str, float]) -> float:
    """From the submit to the start of its program, which prints when that was. The device was used a moment ago."""
    submitted = time.time_ns()
    body = {"name": "gpu", "command": DATE, "resources": {"cpu": 0.1, "memory": "32MiB", **gpu}}
    task = client.submit(body)
    ended = client.wait(task.id, 30)
    assert ended.status == "succeeded", ended
    started = int(client.logs(task.id).data)
    time.sleep(0.01)
    return (started - submitted) / 1e6


def _pid_of(cluster: Cluster, client: CraterClient, task: str) -> int:
    view = client.task(task)
    while view.status != "running":
        assert not view.ended, view
        view = client.task(task, after=view.revision, wait_s=10)
    started = cluster.home / "agent" / "allocations" / str(view.allocation) / "started.json"
    return int(json.loads(started.read_text())["pid"])


def _card_of(client: CraterClient, task: str) -> int:
    return int(client.task(task).devices[0].uuid.rpartition("-")[2])


def _time_to_stop(
    cluster: Cluster, client: CraterClient, cards: Cards, running: Mapping[int, tuple[int, int]], mib: int
) -> float:
    task = _submit(client)
    pid, card = _pid_of(cluster, client, task), _card_of(client, task)
    cards.show({**running, pid: (card, SHARE_MIB // 2)})
    time.sleep(1.5)
    began = time.perf_counter()
    cards.show({**running, pid: (card, mib)})
    ended = client.wait(task, 60)
    took_ms = (time.perf_counter() - began) * 1000
    assert ended.reason is not None, ended
    assert ended.reason.code == "gpu_memory_exceeded", ended
    cards.show(running)
    assert client.node(NODE).devices[card].healthy
    return took_ms
