"""`build_leak_sensor(...)`: finds tasks that hold compute for a run that is over, and runs that live without a worker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dagster import (
    DagsterInstance,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
)

from crater_core.client import CraterClient
from crater_core.clock import Clock, SystemClock
from crater_core.errors import CraterError
from crater_core.wire.tasks import TaskView
from crater_dagster._dagster import storage_id
from crater_dagster.config import GROUP_PREFIX, group_of
from crater_dagster.connect import client_of, launcher_of
from crater_dagster.following import LIVE, ROLE, RUN_WORKER, settle_run
from crater_dagster.owner import OWNER

INTERVAL_S = 60
GRACE_S = 120
"""A run and its tasks do not end at the same moment: a leak is what stays one for this long."""
PATIENCE_S = 5.0
RUNS_MAX = 1000
_ALIVE = (DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING)


@dataclass(frozen=True)
class Leaks:
    """`runs_over` have tasks that still hold compute, or wait for it; `runs_alone` live without a run worker."""

    runs_over: frozenset[str] = frozenset()
    runs_alone: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Suspects:
    """Since when each run has looked like a leak, in milliseconds since the epoch; kept in the sensor's cursor."""

    since_ms: Mapping[str, int] = field(default_factory=dict)

    def seen(self, leaks: Leaks, now_ms: int) -> Suspects:
        return Suspects({run: min(self.since_ms.get(run, now_ms), now_ms) for run in leaks.runs_over | leaks.runs_alone})

    def proven(self, grace_ms: int, now_ms: int) -> set[str]:
        return {run for run, since_ms in self.since_ms.items() if now_ms - since_ms >= grace_ms}

    def to_text(self) -> str:
        return json.dumps(dict(self.since_ms), sort_keys=True)

    @staticmethod
    def from_text(text: str | None) -> Suspects:
        """Of a cursor that is not this sensor's: no suspects."""
        try:
            found = json.loads(text or "{}")
            return Suspects({str(run): int(since_ms) for run, since_ms in found.items()})
        except (ValueError, AttributeError, TypeError):
            return Suspects()


def find_leaks(tasks: Iterable[TaskView], status_of: Mapping[str, DagsterRunStatus], owner: str | None) -> Leaks:
    """Compare the live tasks of Dagster runs with the runs of one instance, whose storage id is `owner`.

    `status_of` has every run that lives, and those of the tasks that the instance knows. A task of a run that is not known
    is a leak only if it carries this owner: several instances may share one scheduler.
    """
    over: set[str] = set()
    with_worker: set[str] = set()
    for task in tasks:
        run = (task.group or "").removeprefix(GROUP_PREFIX)
        if task.ended or task.cancelling or not (task.group or "").startswith(GROUP_PREFIX):
            continue
        status = status_of.get(run)
        ours = owner is not None and task.labels.get(OWNER) == owner
        if (status not in _ALIVE) if status is not None else ours:
            over.add(run)
        if task.labels.get(ROLE) == RUN_WORKER:
            with_worker.add(run)
    alone = {run for run, status in status_of.items() if status in _ALIVE and run not in with_worker}
    return Leaks(frozenset(over), frozenset(alone))


def build_leak_sensor(
    name: str = "crater_leaks",
    *,
    settle: bool = True,
    grace_seconds: int = GRACE_S,
    minimum_interval_seconds: int = INTERVAL_S,
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
    clock: Clock | None = None,
) -> SensorDefinition:
    """A sensor that finds allocations without a live run and runs without a worker, and settles what stays so for
    `grace_seconds`: it cancels those tasks, and fails those runs (one that may be resumed is left to run monitoring).

    `settle=False` only tells. Each tick says what it found; it launches no runs.
    """
    clock = clock or SystemClock()

    def tick(context: SensorEvaluationContext) -> SensorResult:
        suspects = Suspects.from_text(context.cursor)
        try:
            with client_of(context.instance, retry_for_s=PATIENCE_S, timeout_s=PATIENCE_S) as client:
                now_ms = clock.now_ms()
                leaks = _look(context.instance, client)
                suspects = suspects.seen(leaks, now_ms)
                proven = suspects.proven(grace_seconds * 1000, now_ms)
                told = [f"{len(leaks.runs_over)} run(s) are over and have tasks, {len(leaks.runs_alone)} live without a worker."]
                if settle:
                    told += _settle(context.instance, client, leaks, proven)
        except CraterError as error:
            told = [f"Nothing looked at: {error.message}"]
        for line in told:
            context.log.info(line)
        return SensorResult(skip_reason=SkipReason(" ".join(told)), cursor=suspects.to_text())

    return SensorDefinition(
        name=name,
        evaluation_fn=tick,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Finds tasks without a live run and runs without a worker" + (", and settles them." if settle else "."),
    )


def _look(instance: DagsterInstance, client: CraterClient) -> Leaks:
    # Runs first: what is launched between the two looks is then a task without trouble, not a run without a task.
    alive = instance.get_runs(RunsFilter(statuses=list(_ALIVE)), limit=RUNS_MAX) if launcher_of(instance) is not None else []
    tasks = [task for task in client.tasks(status=LIVE) if (task.group or "").startswith(GROUP_PREFIX)]
    known = {run.run_id: run.status for run in alive}
    missing = sorted({(task.group or "").removeprefix(GROUP_PREFIX) for task in tasks} - set(known))
    for first in range(0, len(missing), RUNS_MAX):
        of_tasks = instance.get_runs(RunsFilter(run_ids=missing[first : first + RUNS_MAX]))
        known.update({run.run_id: run.status for run in of_tasks})
    return find_leaks(tasks, known, storage_id(instance))


def _settle(instance: DagsterInstance, client: CraterClient, leaks: Leaks, proven: set[str]) -> list[str]:
    told: list[str] = []
    for run_id in sorted(leaks.runs_over & proven):
        ended = client.cancel_group(group_of(run_id), "its Dagster run is over")
        told.append(f"Run {run_id} is over: {len(ended)} task(s) of it were told to stop.")
    for run_id in sorted(leaks.runs_alone & proven):
        last = next(iter(client.tasks(group=group_of(run_id), labels={ROLE: RUN_WORKER}, limit=1)), None)
        if settle_run(instance, run_id, last):
            client.cancel_group(group_of(run_id), "its run has ended with its run worker")
            told.append(f"Run {run_id} had no worker; it was ended.")
    return told
