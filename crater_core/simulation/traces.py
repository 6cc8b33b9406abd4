"""Traces: nodes, and tasks with their arrival and run time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from crater_core.model.node import GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.resources import Amounts
from crater_core.model.runtimes import rung
from crater_core.model.task import TaskSpec
from crater_core.model.units import MILLI

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
    """Arrivals in the order in which they come."""

    name: str
    nodes: tuple[Node, ...]
    arrivals: tuple[Arrival, ...]


def a_machine(
    name: str,
    cpu_milli: int,
    memory_bytes: int,
    gpus: int,
    gpu_type: str = "gpu",
    labels: dict[str, str] | None = None,
    disk_bytes: int = 1 << 50,
    card_mib: int = CARD_MIB,
) -> Node:
    """A node whose cards can be taken whole or in shares. Traces seldom tell of disks: there is enough."""
    give = Amounts(cpu_milli, memory_bytes, disk_bytes)
    devices = tuple(
        GpuDevice(f"{name}/{i}", i, gpu_type, gpu_type.lower(), card_mib, "gpu", SharingMode.TIME_SLICE, simulated=True)
        for i in range(gpus)
    )
    return Node(name, labels or {}, POOLS, give, give, devices)


def in_order(name: str, nodes: Iterable[Node], arrivals: Iterable[Arrival]) -> Trace:
    """A trace whose clock starts with the first arrival."""
    known = list(arrivals)
    first_ms = min((arrival.at_ms for arrival in known), default=0)
    moved = (replace(arrival, at_ms=arrival.at_ms - first_ms) for arrival in known)
    return Trace(name, tuple(nodes), tuple(sorted(moved, key=lambda arrival: (arrival.at_ms, arrival.spec.name))))


def with_known_ends(trace: Trace, *, exactly: bool = True) -> Trace:
    """The same tasks, each with its true run time as its time limit: what a perfect forecast would know.

    Not `exactly`: rounded up by less than a quarter, as people do; far fewer different limits make a replay much quicker.
    """
    arrivals: list[Arrival] = []
    for arrival in trace.arrivals:
        limit_ms = max(1, arrival.runs_ms) if exactly else rung(arrival.runs_ms)
        arrivals.append(replace(arrival, spec=replace(arrival.spec, time_limit_ms=limit_ms)))
    return replace(trace, arrivals=tuple(arrivals))


def with_checkpoints(trace: Trace, every_ms: int) -> Trace:
    """The same tasks, each saving its work so often, but for those that say how often themselves."""
    arrivals = tuple(
        arrival
        if arrival.spec.checkpoint_every_ms is not None
        else replace(arrival, spec=replace(arrival.spec, checkpoint_every_ms=every_ms))
        for arrival in trace.arrivals
    )
    return replace(trace, arrivals=arrivals)


def split_by_project(trace: Trace) -> list[Trace]:
    """The same tasks on static partitions: each project owns whole nodes in proportion to the GPU time that it asks for, one
    at least.

    Nodes are dealt out from the front; what is left after the whole parts goes to the largest fractions.
    """
    work: dict[str, int] = {}
    for arrival in trace.arrivals:
        work[arrival.spec.project] = work.get(arrival.spec.project, 0) + work_ms(arrival)
    owned = _apportioned(work, len(trace.nodes))
    parts: list[Trace] = []
    first = 0
    for project in sorted(owned):
        nodes = trace.nodes[first : first + owned[project]]
        first += owned[project]
        mine = tuple(arrival for arrival in trace.arrivals if arrival.spec.project == project)
        parts.append(Trace(f"{trace.name}:{project}", nodes, mine))
    return parts


def _apportioned(work: dict[str, int], nodes: int) -> dict[str, int]:
    total = max(1, sum(work.values()))
    exact = {project: nodes * amount / total for project, amount in sorted(work.items())}
    owned = {project: max(1, int(share)) for project, share in exact.items()}
    while sum(owned.values()) < nodes:
        owned[max(exact, key=lambda project: exact[project] - owned[project])] += 1
    while sum(owned.values()) > nodes and max(owned.values()) > 1:
        owned[min((p for p in owned if owned[p] > 1), key=lambda project: exact[project] - owned[project])] -= 1
    return owned


def nodes_for_load(arrivals: Iterable[Arrival], gpus_per_node: int, load_milli: int) -> int:
    """As many as bring the GPU time asked for, over the span of the arrivals, to `load_milli` thousandths of the capacity."""
    work, first, last = 0, 0, 1
    for arrival in arrivals:
        work += work_ms(arrival)
        last = max(last, arrival.at_ms)
    return max(1, round(work * MILLI / (load_milli * gpus_per_node * (last - first))))


def work_ms(arrival: Arrival) -> int:
    """Milliseconds of one GPU."""
    return gpu_milli(arrival.spec) * arrival.runs_ms // MILLI


def gpu_milli(spec: TaskSpec) -> int:
    gpu = spec.request.gpu
    return gpu.count * gpu.compute_milli * spec.members if gpu else 0
