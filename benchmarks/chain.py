"""A chain of Dagster steps under `crater_executor` and under Dagster's default executor, in turns: milliseconds a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.figures import Figure, lower_is_better, median

ROUNDS = 3
PEER = "Dagster's default (multiprocess) executor"


def rows(cluster: Cluster) -> list[Figure]:
    ours: list[float] = []
    peers: list[float] = []
    home = cluster.home / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with _environment(CRATER_ENDPOINT=cluster.url, DAGSTER_HOME=str(home)):
        for number in range(ROUNDS + 1):
            ours_ms, peer_ms = _cadence_ms("crater_chain"), 0.0
            if number:  # The first round starts what stays warm.
                ours.append(ours_ms)
                peer_ms = _cadence_ms("multiprocess_chain")
                peers.append(peer_ms)
    ratio_met = median(peers) / median(ours) >= 12
    return [lower_is_better("dagster.step.chain_ms", median(ours), "ms", PEER, median(peers), 150.0, more=ratio_met)]


def _cadence_ms(job: str) -> float:
    """The median gap between one step's success and the next one's, by the times in Dagster's event log."""
    from dagster import DagsterEventType, DagsterInstance, execute_job, reconstructable

    from benchmarks import chain_jobs

    quiet = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    with DagsterInstance.get() as instance:
        result = execute_job(reconstructable(getattr(chain_jobs, job)), instance=instance, run_config=quiet)
        assert result.success, f"{job} failed"
        log: list[Any] = list(instance.all_logs(result.run_id, of_type=DagsterEventType.STEP_SUCCESS))
        times = sorted(entry.timestamp for entry in log)
    assert len(times) == chain_jobs.STEPS
    return median([(after - before) * 1000 for before, after in pairwise(times)])


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
