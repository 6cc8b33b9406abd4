"""Traces: nodes, and tasks with their arrival and run time, read from the CSV files of public data sets."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from crater_core.errors import InvalidRequest
from crater_core.model.node import GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.resources import Amounts, GpuRequest, Request
from crater_core.model.task import TaskSpec
from crater_core.model.units import GIB, MIB, MILLI

CARD_MIB = 16_384
"""Memory of one simulated card: the traces do not say, and only shares of it matter."""
POOLS = {"gpu": PoolKind.GPU, "cpu": PoolKind.CPU, "memory": PoolKind.MEMORY}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A task that comes at a time and then runs for so long, wherever it is placed."""

    spec: TaskSpec
    at_ms: int = 0
    runs_ms: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    nodes: tuple[Node, ...]
    arrivals: tuple[Arrival, ...]


def a_machine(
    name: str, cpu_milli: int, memory_bytes: int, gpus: int, gpu_type: str = "gpu", labels: dict[str, str] | None = None
) -> Node:
    """A node whose cards can be taken whole or in shares."""
    give = Amounts(cpu_milli, memory_bytes, 0)
    devices = tuple(
        GpuDevice(f"{name}/{i}", i, gpu_type, gpu_type.lower(), CARD_MIB, "gpu", SharingMode.TIME_SLICE, simulated=True)
        for i in range(gpus)
    )
    return Node(name, labels or {}, POOLS, give, give, devices)


def read_openb(nodes_file: Path, tasks_file: Path) -> Trace:
    """The Alibaba 2023 GPU trace: `sn, cpu_milli, memory_mib, gpu, model` and `name, cpu_milli, memory_mib, num_gpu, ...`."""
    nodes = tuple(
        a_machine(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]) * MIB, int(row["gpu"]), row["model"])
        for row in _rows(nodes_file, {"sn", "cpu_milli", "memory_mib", "gpu", "model"})
    )
    arrivals = [_openb_arrival(row) for row in _rows(tasks_file, {"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"})]
    return Trace(tasks_file.stem, nodes, tuple(sorted(arrivals, key=lambda arrival: (arrival.at_ms, arrival.spec.name))))


def _openb_arrival(row: dict[str, str]) -> Arrival:
    count, share = int(row["num_gpu"]), int(row["gpu_milli"] or 0)
    types = tuple(name.lower() for name in (row.get("gpu_spec") or "").split("|") if name)
    gpu: GpuRequest | None = None
    if count:
        whole = count > 1 or share in (0, MILLI)
        gpu = GpuRequest(count, types=types) if whole else GpuRequest(1, min(share, MILLI), 0, exclusive=False, types=types)
    request = Request(int(row["cpu_milli"]), int(row["memory_mib"]) * MIB, 0, gpu)
    at, start, end = (int(row.get(key) or 0) for key in ("creation_time", "scheduled_time", "deletion_time"))
    spec = TaskSpec(row["name"], command=("replayed",), request=request)
    return Arrival(spec, at * 1000, max(0, end - (start or at)) * 1000)


def read_jobs(jobs_file: Path, *, gpus_per_node: int = 8, load_milli: int = 750) -> Trace:
    """Jobs of virtual clusters: `vc, arrival_s, num_gpus, duration_v100_s`. The trace names no nodes: as many are made as
    bring the GPU time asked for, over the span of the trace, to `load_milli` thousandths of the capacity.

    A job of more GPUs than a node has is a gang of full nodes.
    """
    arrivals: list[Arrival] = []
    for number, row in enumerate(_rows(jobs_file, {"vc", "arrival_s", "num_gpus", "duration_v100_s"})):
        gpus, vc = int(row["num_gpus"]), row["vc"]
        members = -(-gpus // gpus_per_node)
        request = Request(4000 * min(gpus, gpus_per_node), 16 * GIB, 0, GpuRequest(min(gpus, gpus_per_node)))
        spec = TaskSpec(f"job-{number:06d}", project=vc, user=vc, command=("replayed",), request=request, members=members)
        arrivals.append(Arrival(spec, int(float(row["arrival_s"]) * 1000), max(1, int(float(row["duration_v100_s"]) * 1000))))
    arrivals.sort(key=lambda arrival: (arrival.at_ms, arrival.spec.name))
    count = nodes_for_load(arrivals, gpus_per_node, load_milli)
    nodes = (
        a_machine(f"node-{i:04d}", 8000 * gpus_per_node, 64 * GIB * gpus_per_node, gpus_per_node, "V100") for i in range(count)
    )
    return Trace(jobs_file.stem, tuple(nodes), tuple(arrivals))


def with_known_ends(trace: Trace) -> Trace:
    """The same tasks, each with its true run time as its time limit: what a perfect forecast would know."""
    arrivals = (replace(arrival, spec=replace(arrival.spec, time_limit_ms=max(1, arrival.runs_ms))) for arrival in trace.arrivals)
    return replace(trace, arrivals=tuple(arrivals))


def nodes_for_load(arrivals: Iterable[Arrival], gpus_per_node: int, load_milli: int) -> int:
    work_ms, first, last = 0, 0, 1
    for arrival in arrivals:
        work_ms += gpu_milli(arrival.spec) * arrival.runs_ms // MILLI
        last = max(last, arrival.at_ms)
    return max(1, round(work_ms * MILLI / (load_milli * gpus_per_node * (last - first))))


def gpu_milli(spec: TaskSpec) -> int:
    gpu = spec.request.gpu
    return gpu.count * gpu.compute_milli * spec.members if gpu else 0


def _rows(path: Path, columns: set[str]) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = columns - set(reader.fieldnames or ())
        if missing:
            raise InvalidRequest(f"{path} lacks the columns {', '.join(sorted(missing))}", path=str(path))
        return list(reader)
