"""Why a worker is being interrupted: because somebody ended its run or its task, or only to go on elsewhere, or for a limit."""

from __future__ import annotations

import os
from collections.abc import Callable

from dagster import DagsterInstance, DagsterRunStatus

from crater_core.errors import CraterError, NotFound
from crater_core.wire.base import ReasonView
from crater_dagster.connect import client_of
from crater_dagster.story import why_queued_again

_ASK_FOR_S = 1.0
_known: dict[tuple[str, str], bool] = {}


def is_being_moved(instance: DagsterInstance, run_id: str) -> bool:
    """Whether the scheduler, not a person, ends this very process: then it tells what becomes of the work (preempted, node
    lost: it goes on elsewhere; over a limit: it has failed, with the numbers). The first answer stands."""
    task_id = os.environ.get("CRATER_TASK_ID", "")
    if (task_id, run_id) not in _known:
        _known[task_id, run_id] = bool(task_id) and not _ended_by_a_person(instance, run_id, task_id)
    return _known[task_id, run_id]


def run_is_being_moved(instance: DagsterInstance, run_id: str) -> bool:
    """As `is_being_moved`, for a run worker. Where a person has cancelled its task, that ends the run: it is marked as being
    canceled, with that person's name, so that Dagster does not take the interruption for a failure."""
    if is_being_moved(instance, run_id):
        return True
    run = instance.get_run_by_id(run_id)
    if run is not None and not _run_is_ending(instance, run_id):
        why = _why_cancelled(instance, os.environ.get("CRATER_TASK_ID", ""))
        if why is not None:
            instance.report_run_canceling(run, f"The task of its run worker was ended. {why}")
    return False


def why_it_was_moved(instance: DagsterInstance) -> ReasonView | None:
    """Why this task's last attempt was ended and this one began; None when nobody can be asked."""
    with client_of(instance, retry_for_s=_ASK_FOR_S, timeout_s=_ASK_FOR_S) as client:
        return why_queued_again(client, os.environ.get("CRATER_TASK_ID", ""))


def steps_go_on(instance: DagsterInstance, run_id: str, dagster_says: Callable[[str], bool]) -> bool:
    """Whether an interrupted run worker leaves its steps running for the one that takes its place. Never when its run was
    terminated, although Dagster says so of every run that may be resumed."""
    if os.environ.get("CRATER_TASK_ID"):
        return run_is_being_moved(instance, run_id)
    return not _run_is_ending(instance, run_id) and dagster_says(run_id)


def run_goes_on(instance: DagsterInstance, run_id: str) -> bool:
    """Whether an executor is there to tell why a step of the run was interrupted."""
    return bool(os.environ.get("CRATER_TASK_ID")) and not _run_is_ending(instance, run_id)


def _run_is_ending(instance: DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is None or run.is_finished or run.status is DagsterRunStatus.CANCELING


def _why_cancelled(instance: DagsterInstance, task_id: str) -> str | None:
    """By whom and why, in a sentence; None when it was not, or when nobody can be asked."""
    try:
        with client_of(instance, retry_for_s=_ASK_FOR_S, timeout_s=_ASK_FOR_S) as client:
            reasons = [event.reason for event in client.events(task_id) if event.what == "cancelling"]
        return reasons[-1].message if reasons and reasons[-1] is not None else None
    except CraterError:
        return None


def _ended_by_a_person(instance: DagsterInstance, run_id: str, task_id: str) -> bool:
    if _run_is_ending(instance, run_id):
        return True
    try:
        with client_of(instance, retry_for_s=_ASK_FOR_S, timeout_s=_ASK_FOR_S) as client:
            view = client.task(task_id)
        return view.cancelling or view.status == "cancelled"
    except NotFound:
        return True
    except CraterError:
        # A node that is cut off ends what may be started elsewhere.
        return False
