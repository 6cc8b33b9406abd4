"""Follows the workers of the runs that this process has launched: tells why one waits, and ends the run of one that has gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dagster import DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

from crater_core.client import CraterClient
from crater_core.errors import CraterError, NotFound
from crater_core.wire.tasks import TaskView
from crater_dagster._dagster import report_step_event
from crater_dagster.reasons import FAILURE_TAG, failure_code, how_it_ended, sentence, why_it_waits
from crater_dagster.shipping import ship

LOOK_EVERY_S = 2.0
RUNS_MAX = 1000
ROLE = "crater/role"
RUN_WORKER, STEP_WORKER = "run", "step"
LIVE = ("queued", "allocated", "running")
_log = logging.getLogger("crater_dagster")


@dataclass
class _Followed:
    run: DagsterRun
    task: str
    told: str | None = None
    """The reason for waiting that was told last."""


class FollowedRuns:
    """One thread, there only while a run of this process lives. Run monitoring does the same for what an ended process had
    launched; this one is quicker, and looks after runs that have not started, which Dagster does not."""

    def __init__(self, instance: Callable[[], DagsterInstance], client: Callable[[], CraterClient]) -> None:
        self._instance, self._client = instance, client
        self._lock = threading.Lock()
        self._runs: dict[str, _Followed] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, run: DagsterRun, view: TaskView) -> None:
        followed = _Followed(run, view.id)
        self._say(followed, view)
        with self._lock:
            if len(self._runs) >= RUNS_MAX and run.run_id not in self._runs:
                return
            self._runs[run.run_id] = followed
            if self._thread is None or not self._thread.is_alive():
                self._stop.clear()
                self._thread = threading.Thread(target=self._watch, name="crater-runs", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            with self._lock:
                if not self._runs:
                    self._thread = None
                    return
                followed = list(self._runs.values())
            try:
                live = {view.id: view for view in self._client().tasks(labels={ROLE: RUN_WORKER}, status=LIVE)}
                for one in followed:
                    self._look(one, live.get(one.task))
                self._end_what_waits_for_nothing([one.run.run_id for one in followed if _waits(live.get(one.task))])
            except CraterError:
                continue
            except Exception:
                # The next look may do better; a thread that has died would look no more.
                _log.exception("could not follow the runs of this process")

    def _look(self, followed: _Followed, view: TaskView | None) -> None:
        if view is not None:
            self._say(followed, view)
            return
        try:
            last = self._client().task(followed.task)
        except NotFound:
            last = None
        if last is None or last.ended:
            with self._lock:
                if self._runs.get(followed.run.run_id) is followed:
                    del self._runs[followed.run.run_id]
            if last is not None:
                self._settle(followed.run.run_id, last)

    def _settle(self, run_id: str, last: TaskView) -> None:
        if last.allocation and last.status != "succeeded":
            # It may have been killed before it could have its own output copied.
            ship(self._instance(), run_id, None, last.id, last.allocation)
        if settle_run(self._instance(), run_id, last):
            self._end_the_rest(run_id)

    def _end_the_rest(self, run_id: str) -> None:
        """Nobody is left who would take in what the run's steps do."""
        self._client().cancel_group(f"dagster-run:{run_id}", "its run has ended with its run worker")

    def _end_what_waits_for_nothing(self, waiting: list[str]) -> None:
        """A run whose worker has not started can be over already: Dagster's start time-out and its "force terminate" say so
        without asking a run launcher."""
        runs = self._instance().get_runs(RunsFilter(run_ids=waiting)) if waiting else []
        for run in runs:
            if run.is_finished:
                self._client().cancel_group(f"dagster-run:{run.run_id}", "its run is over")

    def _say(self, followed: _Followed, view: TaskView) -> None:
        code = why_it_waits(view)
        if code is not None and code != followed.told:
            followed.told = code
            report_step_event(self._instance(), followed.run, None, f"The run worker waits: {sentence(view.reason)}", {})


def _waits(view: TaskView | None) -> bool:
    return view is not None and view.status == "queued"


def settle_run(instance: DagsterInstance, run_id: str, last: TaskView | None) -> bool:
    """Write the end of a run whose worker has left without doing so; `last` is that worker. True when it did: then steps of
    the run may still be there, also of one that was terminated, since its worker may have submitted one at that very moment.

    A worker writes its run's end itself, unless it could not; a run that may be resumed is left to run monitoring.
    """
    run = instance.get_run_by_id(run_id)
    if run is None or run.is_finished:
        return False
    how = how_it_ended(last) if last is not None else "The scheduler does not know of it."
    if run.status is DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, f"Its run worker was stopped. {how}")
        return True
    if last is not None and last.status == "cancelled":
        # By a person who wants no other one in its place either.
        instance.report_run_canceling(run)
        instance.report_run_canceled(run, f"The task of its run worker was ended. {how}")
        return True
    if run.status is DagsterRunStatus.STARTED and instance.run_will_resume(run_id):
        return False
    instance.add_run_tags(run_id, {FAILURE_TAG: failure_code(last.reason if last is not None else None)})
    instance.report_run_failed(run, f"The run worker has left without finishing its run. {how}")
    return True
