"""Placement by the pure functions: how many a second, how a cycle grows, and how well a real trace is packed.

Traces are read from the folder that CRATER_TRACES names (else `traces/`): `openb/`, the public cluster-trace-gpu-v2023 data set
with the fragmentation paper's task lists, and `philly_gavel/`, the jobs of fifteen virtual clusters. Without them only the made
clusters are measured. Run alone: `python -m benchmarks.placement`.
"""

from __future__ import annotations

import csv
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks.figures import Figure, at_most, higher_is_better, lower_is_better, median, plain
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.node import Node
from crater_core.model.plan import Plan
from crater_core.model.resources import Amounts, GpuRequest, Request
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.model.units import GIB, MILLI
from crater_core.scheduling import explain, schedule
from crater_core.simulation import Trace, fill, inflated, read_jobs, read_openb, simulate, with_known_ends
from crater_core.simulation.fill import filled_from
from crater_core.simulation.traces import a_machine

T = TypeVar("T")
SEEDS = (42, 43, 44, 45, 46)
CI_FLOOR = ("kube-scheduler's CI floor at 5,000 nodes (published)", 680)
CI_FLOOR_GPU = ("kube-scheduler's CI floor with a GPU-like resource, 5,000 nodes (published)", 180)
JOBS, JOBS_TAKEN = "philly_gavel/philly_gavel_seed0_15vc.csv", 1_500
GROUP_CYCLE = ("KAI Scheduler's cycle at 4,000 nodes (published)", 2_400)
WORKLOADS = {"default": ("openb", 96.0), "gpuspec33": ("openb_gpuspec33", 93.0), "gpushare100": ("openb_gpushare100", 88.2)}


def rows() -> list[dict[str, Any]]:
    figures = [*growth_with_nodes(), *growth_with_queue(), explaining(), memory()]
    folder = Path(os.environ.get("CRATER_TRACES", "traces"))
    if (folder / "openb").is_dir():
        figures += trace_figures(folder / "openb")
    if (folder / JOBS).is_file():
        figures += backfill_figures(folder / JOBS)
    if not folder.is_dir():
        print(f"  (no folder {folder}: set CRATER_TRACES to measure on real traces)", flush=True)
    return [figure.as_row() for figure in figures]


# --- a real trace


def trace_figures(folder: Path) -> list[Figure]:
    default = openb(folder, "default")
    speed = {strategy: replay_per_s(default, strategy) for strategy in ("best_fit", "fragmentation_aware")}
    figures = [
        higher_is_better("placement.openb.per_s", speed["best_fit"], "a second", *CI_FLOOR_GPU, 20_000),
        higher_is_better("placement.openb_fragmentation.per_s", speed["fragmentation_aware"], "a second", *CI_FLOOR_GPU, 10_000),
    ]
    for workload, (name, target) in WORKLOADS.items():
        ratios = [fill(openb(folder, workload), "fragmentation_aware", seed).ratio_percent[100] for seed in SEEDS]
        published = published_ratio(folder, workload)
        mean = float(np.mean(ratios))
        peer = "the paper's own run, best of six policies (published)"
        figures.append(higher_is_better(f"quality.{name}.alloc_ratio", mean, "%", peer, published, target))
        figures.append(plain(f"quality.{name}.alloc_ratio_spread", float(np.std(ratios)), "%"))
    best_fit = [fill(default, "best_fit", seed).ratio_percent[100] for seed in SEEDS]
    return [*figures, plain("quality.openb.best_fit_alloc_ratio", float(np.mean(best_fit)), "%")]


def openb(folder: Path, workload: str) -> Trace:
    return read_openb(folder / "openb_node_list_gpu_node.csv", folder / f"openb_pod_list_{workload}.csv")


def replay_per_s(trace: Trace, strategy: str) -> float:
    """Decisions a second: the whole inflated trace in one queue, from the first look at it to the plan. Median of three."""
    specs = inflated(trace, SEEDS[0])
    rates: list[float] = []
    for _ in range(3):
        snapshot = filled_from(trace, strategy, SEEDS[0])
        schedule(snapshot, 0)
        snapshot.advance([Task(f"t{i:06d}", spec, TaskStatus.QUEUED, i, i) for i, spec in enumerate(specs)])
        with gc_as_in_service():
            seconds, _ = timed(lambda snapshot=snapshot: schedule(snapshot, len(specs)))
        rates.append(len(specs) / seconds)
    return median(rates)


def published_ratio(folder: Path, workload: str) -> float:
    """The best policy's mean allocation when arrivals reach the capacity, from the published artifact's results."""
    ratios: dict[str, list[float]] = {}
    with (folder / "expected" / "analysis_allo_discrete.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["workload"].endswith(workload):
                ratios.setdefault(row["sc_policy"], []).append(float(row["100"]))
    return max((float(np.mean(values)) for values in ratios.values()), default=0.0)


def backfill_figures(jobs: Path) -> list[Figure]:
    """The first jobs of a real list with true time limits: backfill beside nobody passing, in the same run."""
    trace = read_jobs(jobs)
    trace = with_known_ends(replace(trace, arrivals=trace.arrivals[:JOBS_TAKEN]))
    filled, strict = (simulate(trace, Settings(passing=passing)) for passing in ("backfill", "none"))
    peer = "nobody passes the first in line, same run"
    use = higher_is_better(
        "quality.backfill.utilisation", 100 * filled.utilisation, "%", peer, 100 * strict.utilisation, 100 * strict.utilisation
    )
    hours = [outcome.mean_wait_ms / 3_600_000 for outcome in (filled, strict)]
    return [replace(use, target="higher"), lower_is_better("quality.backfill.mean_wait", hours[0], "h", peer, hours[1], hours[1])]


# --- made clusters


def a_cluster(nodes: int, strategy: str = "best_fit") -> Snapshot:
    """Nodes of four GPUs, a quarter of them without: GPUs are as many as nodes times four, tasks of every kind."""
    snapshot = Snapshot(settings=Settings(strategy=strategy, cycle_tasks_max=1_000_000))
    snapshot.advance([node_of(i) for i in range(nodes)])
    return snapshot


def node_of(i: int) -> Node:
    return a_machine(f"node-{i:05d}", (64 + 32 * (i % 3)) * MILLI, (256 + 128 * (i % 2)) * GIB, 4, ("A100", "T4")[i % 2])


MIX = (
    Request(4000, 16 * GIB, 0, None),
    Request(1000, 4 * GIB, 0, None),
    Request(8000, 32 * GIB, 0, GpuRequest(1)),
    Request(16000, 64 * GIB, 0, GpuRequest(2)),
    Request(4000, 16 * GIB, 0, GpuRequest(1, 500, exclusive=False)),
    Request(2000, 8 * GIB, 0, GpuRequest(1, 250, exclusive=False, types=("t4",))),
    Request(32000, 128 * GIB, 0, GpuRequest(4, types=("a100",))),
    Request(2000, 8 * GIB, 0, GpuRequest(1, 0, 4096, exclusive=False)),
)


def tasks_of(first: int, count: int, wide: bool = False) -> list[Task]:
    projects = ("search", "speech", "vision", "ads")
    return [
        Task(
            f"t{i:07d}",
            TaskSpec(
                "job", project=projects[i % 4], priority=50 + i % 2, command=("true",), request=WIDE if wide else MIX[i % 8]
            ),
            TaskStatus.QUEUED,
            i,
            i,
        )
        for i in range(first, first + count)
    ]


WIDE = Request(8000, 32 * GIB, 0, GpuRequest(4))


def placement_us(nodes: int, count: int = 4_000) -> float:
    """Microseconds for one placement, with the score columns warm."""
    snapshot = a_cluster(nodes)
    count = min(count, nodes * 5)
    commit(snapshot, schedule_after(snapshot, tasks_of(0, 64)))
    snapshot.advance(tasks_of(1000, count))
    with gc_as_in_service():
        seconds, plan = timed(lambda: schedule(snapshot, 10**6))
    return seconds * 1e6 / max(1, len(plan.placements))


def growth_with_nodes() -> list[Figure]:
    cost = {nodes: median([placement_us(nodes) for _ in range(3)]) for nodes in (100, 1_000, 10_000)}
    per_s, growth = 1e6 / cost[10_000], cost[10_000] / cost[100]
    target = higher_is_better("placement.10k_nodes.per_s", per_s, "a second", *CI_FLOOR, 10_000)
    met = bool(target.met) and growth <= 2
    text = "at least 10000 a second, and at most 2 times the cost at 100 nodes"
    return [
        *(plain(f"placement.nodes_{nodes}.us", us, "us a placement") for nodes, us in cost.items()),
        plain("placement.10k_nodes.growth", growth, "times the cost at 100 nodes"),
        replace(target, target=text, met=met),
    ]


def full_cluster(nodes: int, waiting: int) -> Snapshot:
    """Every GPU is taken, and so many tasks wait, in four projects at two priorities."""
    snapshot = a_cluster(nodes)
    commit(snapshot, schedule_after(snapshot, tasks_of(0, nodes, wide=True)))
    snapshot.advance(tasks_of(10**6, waiting, wide=False))
    snapshot.advance(tasks_of(5 * 10**6, max(1, waiting // 10), wide=True))
    for _ in range(20):  # Small tasks fill what is left of cores and memory.
        plan = schedule(snapshot, 1)
        if not plan.placements:
            break
        commit(snapshot, plan)
    return snapshot


def growth_with_queue() -> list[Figure]:
    figures: list[Figure] = []
    for waiting in (100, 1_000, 10_000, 100_000):
        cycle_ms = freed_node_ms(full_cluster(1_000, waiting))
        if waiting < 100_000:
            figures.append(plain(f"placement.queue_{waiting}.cycle_ms", cycle_ms, "ms"))
        else:
            figures.append(lower_is_better("placement.queue_100k.cycle_ms", cycle_ms, "ms", *GROUP_CYCLE, 20))
    return figures


def freed_node_ms(snapshot: Snapshot) -> float:
    """One cycle after everything on one node has ended. Median over eleven nodes."""
    commit(snapshot, schedule(snapshot, 2))
    schedule(snapshot, 2)
    taken: list[float] = []
    with gc_as_in_service():
        for i in range(11):
            free_node(snapshot, f"node-{i * 7:05d}")
            seconds, plan = timed(lambda: schedule(snapshot, 3))
            assert plan.placements, "a freed node is used"
            taken.append(seconds * 1000)
            commit(snapshot, plan)
    return median(taken)


def explaining() -> Figure:
    """All candidates of one task that fits nowhere, 1,500 nodes."""
    snapshot = full_cluster(1_500, 100)
    task = next(task.id for task in snapshot.queued.values() if task.spec.request == WIDE)
    taken = [timed(lambda: explain(snapshot, task, 5))[0] * 1000 for _ in range(11)]
    return at_most("placement.explain.ms", median(taken), "ms", 20)


def memory() -> Figure:
    """Of a process of its own with 10,000 nodes and 100,000 queued tasks after one cycle."""
    code = "from benchmarks.placement import memory_mb; print(memory_mb())"
    root = Path(__file__).parents[1]
    megabytes = float(subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=True, text=True).stdout)
    return at_most("placement.memory.mb", megabytes, "MB", 1_000)


def memory_mb() -> float:
    snapshot = a_cluster(10_000)
    snapshot.advance(tasks_of(0, 100_000))
    schedule(snapshot, 10**6)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


# --- small helpers


def schedule_after(snapshot: Snapshot, tasks: list[Task]) -> Plan:
    snapshot.advance(tasks)
    return schedule(snapshot, 0)


def commit(snapshot: Snapshot, plan: Plan) -> None:
    """Placements as running allocations, and the reasons that are new, without the lifecycle's history."""
    entities: list[Task | Allocation] = []
    for placement in plan.placements:
        task = snapshot.tasks[placement.task]
        request, name = task.spec.request, f"a-{placement.task}"
        gpu, mib = (sum(getattr(g, field) for g in placement.grants) for field in ("compute_milli", "memory_mib"))
        held = Amounts(request.cpu_milli, request.memory_bytes, 0, gpu, mib)
        running = AllocationStatus.RUNNING
        entities.append(Allocation(name, task.id, 1, 0, placement.node, 1, held, placement.grants, status=running))
        entities.append(replace(task, status=TaskStatus.RUNNING))
    entities += [replace(snapshot.tasks[name], reason=reason) for name, reason in (plan.news or {}).items()]
    snapshot.advance(entities)


def free_node(snapshot: Snapshot, node: str) -> None:
    ended = [replace(a, status=AllocationStatus.SUCCEEDED) for a in snapshot.by_node.get(node, {}).values()]
    snapshot.advance(ended)
    snapshot.advance([replace(snapshot.tasks[a.task], status=TaskStatus.SUCCEEDED) for a in ended])


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Processor time: the functions are pure and run in one thread, and other programs must not count."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


@contextmanager
def gc_as_in_service() -> Iterator[None]:
    """A long-running scheduler freezes what it has loaded, so that the collector does not walk it again and again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    print(json.dumps(rows(), indent=2))
