"""Dagster runs as users have them: launched into a code location, under `CraterRunLauncher` and `crater_executor`, in turns
with Dagster's own default launcher and executor on an instance of its own."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from benchmarks.cluster import Cluster
from benchmarks.dagster_jobs import MANY, STEPS
from benchmarks.figures import Figure, at_most, lower_is_better, median, percentile

EXECUTOR = "Dagster's default (multiprocess) executor"
LAUNCHER = "Dagster's default launcher"
ROUNDS = 3
RUN_S = 900.0
LOOKS_S = 0.2
"""Between two looks at whether a run has ended: they take time from what is measured."""


def rows(cluster: Cluster) -> list[Figure]:
    with sides(cluster) as (ours, theirs):
        return [*starts(ours, theirs), *steps(ours, theirs), *_end(ours), *_logs(ours), *many(ours)]


@contextlib.contextmanager
def sides(cluster: Cluster, of_ours: Mapping[str, Any] = {}, of_theirs: Mapping[str, Any] = {}) -> Iterator[tuple[Side, Side]]:
    """Both instances with what stays warm started; the mappings are further keys of each one's dagster.yaml."""
    launcher = {"module": "crater_dagster", "class": "CraterRunLauncher"}
    logs = {"module": "crater_dagster", "class": "CraterComputeLogManager", "config": {"endpoint": cluster.url}}
    config = {"run_launcher": {**launcher, "config": {"endpoint": cluster.url, "env_profile": "dagster"}}, "compute_logs": logs}
    with _side(cluster.home / "dagster", config | of_ours) as ours, _side(cluster.home / "default", of_theirs) as theirs:
        for _ in range(2):
            ours.finish(ours.launch("crater_one"))
        theirs.finish(theirs.launch("default_one"))
        yield ours, theirs


def starts(ours: Side, theirs: Side, name: str = "dagster") -> list[Figure]:
    own = [ours.first_step_ms("crater_one") for _ in range(ROUNDS)]
    peer = [theirs.first_step_ms("default_one") for _ in range(ROUNDS)]
    more = median(peer) / median(own) >= 7
    return [lower_is_better(f"{name}.run_start_ms", median(own), "ms", LAUNCHER, median(peer), 250.0, more=more)]


def steps(ours: Side, theirs: Side, name: str = "dagster") -> list[Figure]:
    chain, fan, peer_chain, peer_fan = [], [], [], []
    for _ in range(2):
        chain.append(ours.cadence_ms("crater_chain"))
        fan.append(ours.each_ms("crater_fan"))
        peer_chain.append(theirs.cadence_ms("default_chain"))
        peer_fan.append(theirs.each_ms("default_fan"))
    more = median(peer_chain) / median(chain) >= 12
    return [
        lower_is_better(f"{name}.step.chain_ms", median(chain), "ms", EXECUTOR, median(peer_chain), 150.0, more=more),
        lower_is_better(f"{name}.step.fan_ms", median(fan), "ms", EXECUTOR, median(peer_fan), 90.0),
    ]


def _end(ours: Side) -> list[Figure]:
    run_id = ours.launch("crater_sleeps")
    ours.wait_for(run_id, "STEP_START")
    began = time.perf_counter()
    ours.instance.run_launcher.terminate(run_id)
    while ours.client.tasks_live(run_id):
        time.sleep(0.01)
    return [at_most("dagster.terminate_ms", (time.perf_counter() - began) * 1000, "ms", 2000.0)]


def _logs(ours: Side) -> list[Figure]:
    run_id = ours.launch("crater_talks")
    ours.wait_for(run_id, "LOGS_CAPTURED")
    manager = ours.instance.compute_log_manager
    (event,) = [event for event in ours.events(run_id) if event.event_type_value == "LOGS_CAPTURED"]
    key = manager.build_log_key_for_run(run_id, event.logs_captured_data.file_key)
    lags, cursor, held = [], None, b""
    while not ours.run(run_id).is_finished:
        data = manager.get_log_data(key, cursor)
        cursor, now = data.cursor, time.time()
        *lines, held = (held + (data.stdout or b"")).split(b"\n")
        lags += [(now - float(line)) * 1000 for line in lines]
        time.sleep(0.1)
    return [at_most("dagster.log_lag_ms", percentile(lags, 95), "ms", 500.0)]


def many(ours: Side, name: str = "dagster") -> list[Figure]:
    """Whether the last steps of a long run cost more than its first."""
    times = ours.successes(ours.finish(ours.launch("crater_many")))[1:]
    part = MANY // 10
    first, last = times[part] - times[0], times[-1] - times[-1 - part]
    return [at_most(f"{name}.many_steps.growth", last / first, f"times the cost of the first {part} of {MANY} steps", 1.2)]


class Side:
    """An instance with a loaded code location."""

    def __init__(self, instance: Any, workspace: Any) -> None:
        self.instance, self._workspace = instance, workspace
        self.client = _Tasks(instance)

    def launch(self, job: str) -> str:
        from benchmarks import dagster_jobs

        context = self._workspace.create_request_context()
        location = context.code_locations[0]
        remote = next(iter(location.get_repositories().values())).get_full_job(job)
        run = self.instance.create_run_for_job(
            dagster_jobs.defs.resolve_job_def(job),
            run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}},
            remote_job_origin=remote.get_remote_origin(),
            job_code_origin=remote.get_python_origin(),
        )
        self.instance.launch_run(run.run_id, context)
        return run.run_id

    def run(self, run_id: str) -> Any:
        return self.instance.get_run_by_id(run_id)

    def finish(self, run_id: str) -> str:
        until = time.monotonic() + RUN_S
        while not self.run(run_id).is_finished:
            assert time.monotonic() < until, f"{run_id} did not end"
            time.sleep(LOOKS_S)
        assert self.run(run_id).status.value == "SUCCESS", [event.message for event in self.events(run_id)][-3:]
        return run_id

    def events(self, run_id: str) -> list[Any]:
        return [entry.dagster_event for entry in self.instance.all_logs(run_id) if entry.dagster_event is not None]

    def wait_for(self, run_id: str, kind: str) -> None:
        while not any(event.event_type_value == kind for event in self.events(run_id)):
            time.sleep(0.02)

    def times(self, run_id: str, kind: str) -> list[float]:
        """In milliseconds since the epoch, by Dagster's own event log."""
        entries = self.instance.all_logs(run_id)
        return sorted(e.timestamp * 1000 for e in entries if e.dagster_event and e.dagster_event.event_type_value == kind)

    def successes(self, run_id: str) -> list[float]:
        return self.times(run_id, "STEP_SUCCESS")

    def first_step_ms(self, job: str) -> float:
        """From the call of the launcher to the first step's start."""
        began = time.time() * 1000
        return self.times(self.finish(self.launch(job)), "STEP_START")[0] - began

    def cadence_ms(self, job: str) -> float:
        """The median gap between one step's success and the next one's."""
        times = self.successes(self.finish(self.launch(job)))
        assert len(times) == STEPS
        return median([after - before for before, after in pairwise(times)])

    def each_ms(self, job: str) -> float:
        """The whole time of the steps by their number."""
        run_id = self.finish(self.launch(job))
        return (self.successes(run_id)[-1] - self.times(run_id, "PIPELINE_START")[0]) / STEPS


class _Tasks:
    def __init__(self, instance: Any) -> None:
        self._launcher = instance.run_launcher

    def tasks_live(self, run_id: str) -> bool:
        from crater_dagster.config import group_of

        return any(not task.ended for task in self._launcher.client().tasks(group=group_of(run_id)))


@contextlib.contextmanager
def _side(home: Path, config: Mapping[str, Any]) -> Iterator[Side]:
    from dagster import DagsterInstance
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import ModuleTarget

    home.mkdir()
    (home / "dagster.yaml").write_text(yaml.safe_dump({"telemetry": {"enabled": False}, **config}))
    with _environment(DAGSTER_HOME=str(home)), DagsterInstance.from_config(str(home)) as instance:
        instance.optimize_for_webserver(statement_timeout=15_000, pool_recycle=3600, max_overflow=20)  # As the web page has it.
        target = ModuleTarget("benchmarks.dagster_jobs", "defs", str(Path(__file__).parents[1]), "bench")
        with WorkspaceProcessContext(instance, target) as workspace:
            yield Side(instance, workspace)


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
