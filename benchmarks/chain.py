"""A chain of Dagster steps under `crater_executor` and under Dagster's default executor, in turns: milliseconds a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.figures import Figure, lower_is_better, median

PEER = "Dagster's default (multiprocess) executor"


def rows(cluster: Cluster) -> list[Figure]:
    home = cluster.home / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with _environment(CRATER_ENDPOINT=cluster.url, DAGSTER_HOME=str(home)):
        _cadence_ms("crater_chain")  # The first one starts what stays warm.
        before = _cadence_ms("crater_chain")
        peer = _cadence_ms("multiprocess_chain")
        after = _cadence_ms("crater_chain")
    ours = median([before, after])
    return [lower_is_better("dagster.step.chain_ms", ours, "ms", PEER, peer, 150.0, more=peer / ours >= 12)]


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
