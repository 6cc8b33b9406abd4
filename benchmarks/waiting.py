"""How long tasks wait: pooled nodes beside static partitions with first come first served, in the same run.

Philly: the jobs of fifteen virtual clusters (the folder that CRATER_TRACES names), nodes of 8 GPUs, as many as bring the GPU time
asked for over the trace's span to 0.75 of the capacity. Static: each virtual cluster owns whole nodes in proportion to its GPU
time, nobody passes. Pooled: one cluster; each virtual cluster is guaranteed as many GPUs as it owns when static, lent, and taken
back after an hour's patience; the project that holds less goes first, backfill, shorter tasks first. Run times are known to the
next quarter, and in a second row only foretold from the same tenant's past. A task that is stopped begins anew: its lost work
counts as waiting, and not as use. A virtual cluster that is asked for a job larger than its own nodes refuses it; such jobs run
in the pooled cluster only.

Reference cluster: 8 nodes of 2 GPUs, 64 cores and 256 GB, four teams, each with two nodes when static; the GPU jobs' sizes come
from the same trace, their lengths divided by ten, an offered load of 0.9; a third of the jobs, all of one GPU, can use half a
card. The longest job runs for thirteen days, so jobs come for weeks: over a few days most of the load would lie behind the end of
the measurement. The bound is what would be held if every task started when it came.

Once nothing is preempted. Once a job's priority is the higher the shorter its limit, as where a site has a queue for each length,
shorter ones may stop longer ones, and all save their work every ten minutes. Beside it what no scheduler can do: cards that
are not split over nodes, run times known to the millisecond, and stopping, moving and going on free of charge.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure, higher_is_better, lower_is_better, plain
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.snapshot import Settings
from crater_core.model.task import TaskSpec
from crater_core.model.units import GIB, MILLI
from crater_core.simulation import Arrival, Outcome, Trace, read_jobs, simulate, simulate_partitions, with_known_ends
from crater_core.simulation.outcome import joined, percentile
from crater_core.simulation.traces import a_machine, gpu_milli, in_order, split_by_project, work_ms

JOBS = "philly_gavel/philly_gavel_seed0_15vc.csv"
HOUR_MS = 3_600_000
SEEDS = (42, 43, 44)
PEER = "static partitions, first come first served, same run"
STATIC = Settings(passing="none", cycle_tasks_max=60, raise_after_ms=0, fair_share_half_life_ms=0, foretell=False)
POOLED = replace(STATIC, passing="backfill", short_first_milli=20_000, reclaim_after_ms=HOUR_MS)
FORETOLD = replace(POOLED, foretell=True, hold_after_ms=10 * 24 * HOUR_MS)
"""Where tasks wait and run for days, ten minutes of patience would be none."""
REFERENCE = replace(POOLED, strategy="fragmentation_aware")
PREEMPTED = replace(REFERENCE, preempt_min_run_ms=15 * 60_000)
CHECKPOINT_MS = 10 * 60_000
LENGTHS_MIN = ((15, 58), (60, 56), (4 * 60, 54), (12 * 60, 52), (24 * 60, 50), (48 * 60, 48), (96 * 60, 46))
"""Limits up to so many minutes, and their priority."""
LONGEST = 44
REFERENCE_JOBS, TEAMS = 4_000, 4


def rows() -> list[dict[str, Any]]:
    path = Path(os.environ.get("CRATER_TRACES", "traces")) / JOBS
    if not path.is_file():
        print(f"  (no file {path}: set CRATER_TRACES to measure waiting times)", flush=True)
        return []
    jobs = read_jobs(path)
    runs: dict[str, tuple[Callable[..., Outcome], Trace, Settings, tuple[QuotaPolicy, ...]]] = {
        "philly": (simulate, with_known_ends(jobs, exactly=False), POOLED, guarantees(jobs)),
        "philly foretold": (simulate, jobs, FORETOLD, guarantees(jobs)),
        "philly static": (_static, jobs, STATIC, ()),
    }
    shared = {seed: reference_trace(jobs, seed, shares=True) for seed in SEEDS}
    for seed, trace in shared.items():
        runs[f"reference {seed}"] = (simulate, with_known_ends(trace, exactly=False), REFERENCE, ())
        runs[f"reference preempted {seed}"] = (simulate, by_length(with_known_ends(trace, exactly=False)), PREEMPTED, ())
        runs[f"reference static {seed}"] = (_two_nodes_each, reference_trace(jobs, seed, shares=False), STATIC, ())
    with ProcessPoolExecutor(os.cpu_count()) as pool:  # Each is deterministic, so nothing is lost by running some at once.
        futures = {name: pool.submit(*run) for name, run in runs.items()}
        found = {name: future.result() for name, future in futures.items()}
    figures = [
        *philly(found["philly static"], found["philly"], found["philly foretold"]),
        *reference_cluster(
            list(shared.values()),
            [found[f"reference static {seed}"] for seed in SEEDS],
            [found[f"reference {seed}"] for seed in SEEDS],
            [found[f"reference preempted {seed}"] for seed in SEEDS],
        ),
    ]
    return [figure.as_row() for figure in figures]


def _static(trace: Trace, settings: Settings, _: tuple[QuotaPolicy, ...]) -> Outcome:
    return simulate_partitions(trace, settings)


def _two_nodes_each(trace: Trace, settings: Settings, _: tuple[QuotaPolicy, ...]) -> Outcome:
    until_ms = max(arrival.at_ms for arrival in trace.arrivals)
    parts = [
        Trace(team, trace.nodes[2 * i : 2 * i + 2], tuple(one for one in trace.arrivals if one.spec.project == team))
        for i, team in enumerate(f"team-{number}" for number in range(TEAMS))
    ]
    return joined([simulate(part, settings, until_ms=until_ms) for part in parts], trace.name, "two nodes each")


def guarantees(jobs: Trace) -> tuple[QuotaPolicy, ...]:
    """To each virtual cluster what it owns when nodes are not pooled, lent while it is not wanted."""
    return tuple(
        QuotaPolicy(
            part.arrivals[0].spec.project,
            (part.arrivals[0].spec.project,),
            guarantee=Limits(gpu_milli=MILLI * sum(len(node.devices) for node in part.nodes)),
            lend=True,
        )
        for part in split_by_project(jobs)
    )


def philly(static: Outcome, pooled: Outcome, foretold: Outcome) -> list[Figure]:
    return [
        *_waits("quality.philly", static, pooled),
        plain("quality.philly.preemptions", pooled.preemptions, "times"),
        plain("quality.philly.foretold.wait_ratio", foretold.mean_wait_ms / static.mean_wait_ms, "of the static mean"),
        plain("quality.philly.foretold.mean_wait", foretold.mean_wait_ms / HOUR_MS, "h"),
        plain("quality.philly.foretold.utilisation", 100 * foretold.utilisation, "%"),
        plain("quality.philly.foretold.tenants_worse_off", len(worse_off(static, foretold)), "tenants"),
    ]


def _waits(name: str, static: Outcome, pooled: Outcome) -> list[Figure]:
    hours = [outcome.mean_wait_ms / HOUR_MS for outcome in (pooled, static)]
    use = [100 * outcome.utilisation for outcome in (pooled, static)]
    worse = worse_off(static, pooled)
    return [
        lower_is_better(f"{name}.wait_ratio", hours[0] / hours[1], "of the static mean", PEER, 1.0, 0.2),
        lower_is_better(f"{name}.mean_wait", hours[0], "h", PEER, hours[1], hours[1] / 5),
        replace(higher_is_better(f"{name}.utilisation", use[0], "%", PEER, use[1], use[1]), target="higher"),
        replace(plain(f"{name}.tenants_worse_off", len(worse), "tenants"), target="at most 0 tenants", met=not worse),
    ]


def worse_off(static: Outcome, pooled: Outcome) -> dict[str, tuple[float, float]]:
    """Projects whose p95 of waiting is worse when pooled: hours before and after."""
    before, after = static.waits_of, pooled.waits_of
    tails = {project: (percentile(waits, 95), percentile(after.get(project, []), 95)) for project, waits in before.items()}
    return {project: (was / HOUR_MS, now / HOUR_MS) for project, (was, now) in tails.items() if now > was}


def reference_cluster(
    traces: list[Trace], static: list[Outcome], pooled: list[Outcome], preempted: list[Outcome]
) -> list[Figure]:
    """Means over seeds, and the spread of the wait."""
    minutes = [outcome.mean_wait_ms / 60_000 for outcome in preempted]
    name = "quality.reference_cluster"
    use = [100 * _mean(outcome.utilisation for outcome in outcomes) for outcomes in (preempted, static)]
    waited = _mean(minutes), _mean(outcome.mean_wait_ms / 60_000 for outcome in static)
    return [
        lower_is_better(f"{name}.mean_wait", waited[0], "min", PEER, waited[1], 10),
        plain(f"{name}.mean_wait_spread", float(np.std(minutes)), "min"),
        plain(f"{name}.mean_wait_clairvoyant", _mean(clairvoyant_wait_ms(trace) / 60_000 for trace in traces), "min"),
        plain(f"{name}.mean_until_start", _mean(outcome.mean_until_start_ms / 60_000 for outcome in preempted), "min"),
        plain(f"{name}.p95_wait", _mean(outcome.percentile_wait_ms(95) / 60_000 for outcome in preempted), "min"),
        plain(f"{name}.median_wait", _mean(outcome.percentile_wait_ms(50) / 60_000 for outcome in preempted), "min"),
        plain(f"{name}.preemptions", _mean(outcome.preemptions for outcome in preempted), "times"),
        higher_is_better(f"{name}.utilisation", use[0], "%", PEER, use[1], 85),
        plain(f"{name}.held", 100 * _mean(outcome.allocation_ratio for outcome in preempted), "%"),
        plain(f"{name}.utilisation_bound", 100 * _mean(_held_at_most(trace) for trace in traces), "%"),
        plain(f"{name}.unpreempted.mean_wait", _mean(outcome.mean_wait_ms / 60_000 for outcome in pooled), "min"),
        plain(f"{name}.unpreempted.p95_wait", _mean(outcome.percentile_wait_ms(95) / 60_000 for outcome in pooled), "min"),
        plain(f"{name}.unpreempted.utilisation", 100 * _mean(outcome.utilisation for outcome in pooled), "%"),
    ]


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def by_length(trace: Trace) -> Trace:
    """The same tasks; those on GPUs save their work, may stop others, and have their priority by their limit."""

    def of(arrival: Arrival) -> Arrival:
        spec = arrival.spec
        if spec.request.gpu is None or spec.time_limit_ms is None:
            return arrival
        priority = next((priority for most, priority in LENGTHS_MIN if spec.time_limit_ms <= most * 60_000), LONGEST)
        return replace(arrival, spec=replace(spec, priority=priority, strategy="preemptive", checkpoint_every_ms=CHECKPOINT_MS))

    return replace(trace, arrivals=tuple(of(arrival) for arrival in trace.arrivals))


def clairvoyant_wait_ms(trace: Trace) -> float:
    """The mean wait over all tasks where cards are one heap and stopping is free: at any time those with the least work left run.
    Tasks without a GPU never wait.
    """
    jobs = [arrival for arrival in trace.arrivals if arrival.spec.request.gpu is not None]
    wants = [gpu_milli(job.spec) for job in jobs]
    left = [job.runs_ms for job in jobs]
    capacity = MILLI * sum(len(node.devices) for node in trace.nodes)
    here: set[int] = set()
    running: list[int] = []
    now_ms = come = waited_ms = 0
    while come < len(jobs) or here:
        next_ms = min([now_ms + left[job] for job in running] + [job.at_ms for job in jobs[come : come + 1]])
        for job in running:
            left[job] -= next_ms - now_ms
            if not left[job]:
                here.remove(job)
                waited_ms += next_ms - jobs[job].at_ms - jobs[job].runs_ms
        now_ms = next_ms
        while come < len(jobs) and jobs[come].at_ms <= now_ms:
            here.add(come)
            come += 1
        free, running = capacity, []
        for job in sorted(here, key=lambda job: (left[job] * wants[job], job)):
            if wants[job] <= free:
                free -= wants[job]
                running.append(job)
    return waited_ms / len(trace.arrivals)


def _held_at_most(trace: Trace) -> float:
    """The part of the GPUs that would be held while tasks still come, if each started when it came."""
    last_ms = max(arrival.at_ms for arrival in trace.arrivals)
    held = sum(gpu_milli(one.spec) * min(one.runs_ms, last_ms - one.at_ms) for one in trace.arrivals)
    return held / (last_ms * MILLI * sum(len(node.devices) for node in trace.nodes))


def reference_trace(jobs: Trace, seed: int, *, shares: bool) -> Trace:
    """Jobs drawn from the trace's sizes and lengths, each with a preparation on cores before it, on the reference cluster."""
    random = np.random.default_rng(seed)
    arrivals: list[Arrival] = []
    drawn = [jobs.arrivals[i] for i in random.integers(0, len(jobs.arrivals), REFERENCE_JOBS).tolist()]
    ones = sum(_gpus(job) == 1 for job in drawn)
    halves = [
        _gpus(job) == 1 and chance < REFERENCE_JOBS / 3 / ones
        for job, chance in zip(drawn, random.random(REFERENCE_JOBS), strict=True)
    ]
    work = sum(work_ms(job) // 10 // (1 + half) for job, half in zip(drawn, halves, strict=True))
    span_ms = work * MILLI // (900 * 16)
    for number, (job, at_ms) in enumerate(zip(drawn, np.sort(random.integers(0, span_ms, REFERENCE_JOBS)).tolist(), strict=True)):
        gpus, team, runs_ms = _gpus(job), f"team-{number % TEAMS}", max(1, job.runs_ms // 10)
        each = GpuRequest(1, 500, 0, exclusive=False) if halves[number] and shares else GpuRequest(min(2, gpus))
        request = Request(8_000 * min(2, gpus), 24 * GIB, 0, each)
        members = -(-gpus // 2)
        spec = TaskSpec(f"train-{gpus}", project=team, user=team, command=("replayed",), request=request, members=members)
        preparation = TaskSpec(
            "prepare", project=team, user=team, command=("replayed",), request=Request(4_000, 8 * GIB), priority=60
        )
        arrivals.append(Arrival(preparation, max(0, int(at_ms) - 600_000), 600_000))
        arrivals.append(Arrival(spec, int(at_ms), runs_ms))
    for team in range(TEAMS):
        spec = TaskSpec(
            f"serve-{team}", project=f"team-{team}", user="svc", command=("replayed",), request=Request(4_000, 8 * GIB)
        )
        arrivals.append(Arrival(spec, 0, span_ms))
    nodes = [a_machine(f"node-{i}", 64_000, 256 * GIB, 2) for i in range(8)]
    return in_order(f"reference-{seed}", nodes, arrivals)


def _gpus(job: Arrival) -> int:
    gpu = job.spec.request.gpu
    return (gpu.count if gpu else 1) * job.spec.members
