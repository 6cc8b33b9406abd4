"""Fills a cluster with tasks that never leave and drops what does not fit: the experiment of Weng et al. (USENIX ATC 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from crater_core.lifecycle import apply
from crater_core.lifecycle.inputs import CancelAsked, Input, NodeRegistered, Planned, TaskSubmitted
from crater_core.model.plan import Admitted
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import TaskSpec
from crater_core.model.units import MILLI
from crater_core.scheduling import admit, count_workload, learn_workload, schedule
from crater_core.scheduling.prices import price_table
from crater_core.simulation.traces import Trace, gpu_milli

BATCH = 100
"""Tasks that come between two cycles. Nothing leaves, so one at a time gives the same."""


@dataclass(frozen=True, slots=True)
class Fill:
    """`ratio_percent[k]` is the allocated part of all GPU compute, averaged while arrivals asked for k % of it."""

    strategy: str
    seed: int
    arrivals: int
    placed: int
    ratio_percent: dict[int, float]


def inflated(trace: Trace, seed: int, until_percent: int = 130) -> list[TaskSpec]:
    """The trace's tasks in random order, then random ones again, until they have asked for so much of the capacity."""
    random = np.random.default_rng(seed)
    specs = [arrival.spec for arrival in trace.arrivals]
    order: list[int] = random.permutation(len(specs)).tolist()
    chosen = [specs[i] for i in order]
    capacity = MILLI * sum(len(node.devices) for node in trace.nodes)
    asked = sum(gpu_milli(spec) for spec in chosen)
    while True:
        spec = specs[int(random.integers(len(specs)))]
        asked += gpu_milli(spec)
        if asked * 100 > until_percent * capacity:
            return chosen
        chosen.append(spec)


def fill(trace: Trace, strategy: str, seed: int, until_percent: int = 130, prices: bool = True) -> Fill:
    """One run. Equal nodes are taken in an order drawn from the seed, as in the paper's experiment. Without prices,
    `fragmentation_aware` is the paper's own rule.
    """
    specs = inflated(trace, seed, until_percent)
    snapshot = filled_from(trace, strategy, seed, prices)
    capacity = MILLI * sum(len(node.devices) for node in trace.nodes)
    asked = held = placed = 0
    seen: dict[int, list[float]] = {}
    for first in range(0, len(specs), BATCH):
        batch = {f"t{first + i:07d}": spec for i, spec in enumerate(specs[first : first + BATCH])}
        started = _cycle(snapshot, batch, first)
        for name, spec in batch.items():
            asked += gpu_milli(spec)
            if name in started:
                held += gpu_milli(spec)
                placed += 1
            seen.setdefault(round(100 * asked / capacity), []).append(100 * held / capacity)
    return Fill(strategy, seed, len(specs), placed, {k: round(float(np.mean(ratios)), 3) for k, ratios in seen.items()})


def filled_from(trace: Trace, strategy: str, seed: int, prices: bool = True) -> Snapshot:
    """An empty cluster of the trace's nodes, renamed in random order, that knows the trace's workload, and prices made of it."""
    order = np.random.default_rng(seed + 1_000_003).permutation(len(trace.nodes))
    workload = learn_workload(arrival.spec for arrival in trace.arrivals)
    snapshot = Snapshot(settings=Settings(strategy=strategy, cycle_tasks_max=1_000_000, workload=workload))
    for node, place in zip(trace.nodes, order.tolist(), strict=True):
        step(snapshot, NodeRegistered(replace(node, name=f"{place:06d}-{node.name}")), 0)
    if prices:
        snapshot.prices = price_table(trace.nodes, count_workload(arrival.spec for arrival in trace.arrivals))
    return snapshot


def _cycle(snapshot: Snapshot, batch: dict[str, TaskSpec], now_ms: int) -> set[str]:
    for offset, (name, spec) in enumerate(batch.items()):
        if isinstance(admit(spec, snapshot), Admitted):
            step(snapshot, TaskSubmitted(name, spec), now_ms + offset)
    plan = schedule(snapshot, now_ms + len(batch))
    step(snapshot, Planned(plan, tuple(f"a-{p.task}-{p.member}" for p in plan.placements)), now_ms + len(batch))
    for name in list(snapshot.queued):
        step(snapshot, CancelAsked(name, "the experiment"), now_ms + len(batch))
    return {placement.task for placement in plan.placements}


def step(snapshot: Snapshot, happened: Input, now_ms: int) -> None:
    """Apply and take in, as the service does in one commit."""
    changes = apply(snapshot, happened, now_ms)
    snapshot.revision += 1
    snapshot.advance(changes.puts, changes.removed)
