"""From submit to a running process, and small tasks a second: Crater beside Dask, in turns in the same minutes.

Both start `/bin/date` (its output is its start time) or `/bin/true` as a process of its own for each task. What differs is said
with the figures: Crater has committed each task to disk before it answers, places it, and makes a cgroup for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.figures import Figure, higher_is_better, lower_is_better, median, percentile, plain
from crater_core.client import CraterClient

LATENCY_ROUNDS = 200
TASKS = 1_000
ROUNDS = 3
SUBMITTERS = 4
SMALL = {"cpu": 0.1, "memory": "32MiB"}
PEER = "Dask distributed, subprocess in a task"
WARM_PEER = "Dask distributed, a function in a worker"
DATE = ("/bin/date", "+%s%N")
NOW = {"command": ("python", "-m", "benchmarks.now"), "warm_preload": ["benchmarks.now"], "env_profile": "dagster"}
"""The profile says where the module is."""
_numbers = count()


def rows(cluster: Cluster) -> list[Figure]:
    with CraterClient(cluster.url) as client, _dask() as dask:
        return [*_latency(client, dask), *_throughput(client, dask)]


def _latency(client: CraterClient, dask: Any) -> list[Figure]:
    cold: dict[str, Any] = {"command": DATE}
    ours, peers = _in_turns(lambda: _start_ms(client, cold), lambda: _dask_start_ms(dask, _run_date))
    warm, warm_peers = _in_turns(lambda: _start_ms(client, NOW), lambda: _dask_start_ms(dask, _now))
    p99 = percentile(ours, 99)
    return [
        lower_is_better("latency.submit_start.ms", median(ours), "ms", PEER, median(peers), 4.0, more=p99 <= 15),
        lower_is_better("latency.submit_start_p99.ms", p99, "ms", PEER, percentile(peers, 99), 15.0),
        lower_is_better("latency.submit_start_warm.ms", median(warm), "ms", WARM_PEER, median(warm_peers), 3.0),
    ]


def _in_turns(one: Callable[[], float], other: Callable[[], float]) -> tuple[list[float], list[float]]:
    pairs = [(one(), other()) for _ in range(LATENCY_ROUNDS + 20)][20:]  # The first ones warm connections and caches.
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _start_ms(client: CraterClient, program: Mapping[str, Any]) -> float:
    submitted = time.time_ns()
    task = client.submit({"name": "latency", "resources": {"cpu": 1, "memory": "32MiB"}, **program})
    ended = client.wait(task.id, 30)
    assert ended.status == "succeeded", ended
    started = int(client.logs(task.id).data)
    time.sleep(0.01)
    return (started - submitted) / 1e6


def _dask_start_ms(dask: Any, function: Callable[[int], Any]) -> float:
    submitted = time.time_ns()
    started = int(dask.submit(function, next(_numbers), pure=False).result())
    time.sleep(0.01)
    return (started - submitted) / 1e6


def _throughput(client: CraterClient, dask: Any) -> list[Figure]:
    bulk: list[float] = []
    single: list[float] = []
    peers: list[float] = []
    for _ in range(ROUNDS):
        bulk.append(_per_second(lambda: _run_all(client, _submit_bulk)))
        peers.append(_per_second(lambda: dask.gather(dask.map(_run_true, range(TASKS), pure=False))))
        single.append(_per_second(lambda: _run_all(client, _submit_single)))
    peer = median(peers)
    return [
        higher_is_better("throughput.tasks_per_s", median(bulk), "tasks/s", PEER, peer, 750),
        higher_is_better("throughput.tasks_single_per_s", median(single), "tasks/s", PEER, peer, 500),
        plain("throughput.tasks_running_at_once_max", len(os.sched_getaffinity(0)) / float(str(SMALL["cpu"])), "tasks"),
    ]


def _per_second(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return TASKS / (time.perf_counter() - start)


def _run_all(client: CraterClient, submit: Callable[[CraterClient, str], None]) -> None:
    """Until the last of a group of tasks has ended, told by the scheduler's stream of changes."""
    group = f"throughput-{next(_numbers)}"
    revision = client.health().revision
    submit(client, group)
    ended: set[str] = set()
    while len(ended) < TASKS:
        changes = client.changes(revision, group=group, wait_s=10)
        revision = changes.revision
        for task in changes.tasks:
            if task.ended:
                assert task.status == "succeeded", task
                ended.add(task.id)


def _task(group: str) -> dict[str, Any]:
    return {"name": "small", "command": ("/bin/true",), "resources": SMALL, "group": group}


def _submit_bulk(client: CraterClient, group: str) -> None:
    client.submit_many([_task(group)] * TASKS)


def _submit_single(client: CraterClient, group: str) -> None:
    with ThreadPoolExecutor(SUBMITTERS) as pool:
        list(pool.map(lambda _: client.submit(_task(group)), range(TASKS)))


@contextlib.contextmanager
def _dask() -> Iterator[Any]:
    """Two worker processes of one thread, as many as the machine this was written for has cores."""
    from distributed import Client, LocalCluster

    workers = len(os.sched_getaffinity(0))
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as local,
        Client(local) as client,
    ):
        client.gather(client.map(_run_true, range(50), pure=False))
        yield client


def _run_date(_: int) -> str:
    return subprocess.run(DATE, capture_output=True, text=True, check=True).stdout


def _now(_: int) -> int:
    return time.time_ns()


def _run_true(_: int) -> None:
    subprocess.run(("/bin/true",), check=True)
