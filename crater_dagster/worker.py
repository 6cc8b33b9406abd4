"""`python -m crater_dagster.worker run|step`: what runs on a node for Dagster. Its arguments come in its environment.

Exit codes: 0 done, 1 the run or step failed, 2 it could not be begun (arguments, DAGSTER_HOME, no such run), 143 interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import Any, NoReturn

DONE, FAILED, NOT_BEGUN, INTERRUPTED = 0, 1, 2, 143
COPIES_S = 60.0
"""How long a run worker stays for copies of output that are not done, after its run has ended."""
_early: list[int] = []


def _note(number: int, frame: FrameType | None) -> None:
    _early.append(number)


def main(argv: list[str] | None = None) -> int:
    """Ends with the exit code; whatever happened to the run is in its event log, and a sentence on stderr."""
    # While Dagster is being imported a signal would end this process without a word in the run's log.
    signal.signal(signal.SIGTERM, _note)
    from crater_dagster.payload import unpack

    what = (sys.argv[1:] if argv is None else argv)[:1]
    try:
        if what not in (["run"], ["step"]):
            raise ValueError("usage: python -m crater_dagster.worker run|step")
        content = unpack(os.environ)
    except ValueError as error:
        return _say(str(error))
    from crater_dagster import _dagster
    from crater_dagster.connections import kept_connections

    problem = _dagster.worker_environment_problem()
    if problem:
        return _say(problem)
    with _dagster.capture_interrupts():
        if _early:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            with _dagster.open_instance() as instance, kept_connections(_dagster.keep_connections(instance)):
                return _work(what[0], instance, content)
        except (KeyboardInterrupt, _dagster.DagsterExecutionInterruptedError):
            return INTERRUPTED


def _work(what: str, instance: Any, content: dict[str, Any]) -> int:
    run = instance.get_run_by_id(content["run_id"])
    if run is None:
        return _say(f"this node's Dagster instance has no run {content['run_id']}: do all nodes share one database?")
    if run.is_finished:
        # Ended while this waited to be started: by a time-out of Dagster's, or by a person.
        _say(f"run {run.run_id} is over ({run.status.value}), so nothing is begun")
        return DONE
    return _run(instance, run, bool(content["resume"])) if what == "run" else _step(instance, run, content)


def _say(problem: str) -> int:
    sys.stderr.write(f"crater_dagster.worker: {problem}\n")
    return NOT_BEGUN


def _attempt() -> int:
    """Of this task: above 1 when an earlier one was lost or preempted, and this one takes its place."""
    return int(os.environ.get("CRATER_ATTEMPT", "1"))


def _run(instance: Any, run: Any, resume: bool) -> int:
    from dagster import DagsterRunStatus

    from crater_dagster import _dagster, shipping
    from crater_dagster.moving import run_is_being_moved

    if run.status is DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, "The run was terminated before its worker began.")
        return INTERRUPTED
    if not resume and _attempt() > 1 and run.status is DagsterRunStatus.STARTED:
        if not _dagster.is_driven_by(run, "crater"):
            return _fail_what_was_moved(instance, run)
        resume = True
    _dagster.hold_back_interruptions(instance, lambda: run_is_being_moved(instance, run.run_id))
    try:
        code = _dagster.execute_run(instance, run, resume)
    finally:
        task, allocation = os.environ.get("CRATER_TASK_ID"), os.environ.get("CRATER_ALLOCATION_ID")
        if task and allocation:
            shipping.ship(instance, run.run_id, None, task, allocation)
        shipping.tell_problems(instance, run, COPIES_S)
    after = instance.get_run_by_id(run.run_id)
    if after is None or after.is_finished:
        return code
    if after.status is DagsterRunStatus.CANCELING:
        instance.report_run_canceled(after, "The run worker was interrupted.")
    return INTERRUPTED


def _fail_what_was_moved(instance: Any, run: Any) -> int:
    """What ran its steps in its own process has taken them along. Whether to begin anew is for Dagster's run retries."""
    from crater_dagster.moving import why_it_was_moved
    from crater_dagster.reasons import FAILURE_TAG, failure_code, sentence

    why = why_it_was_moved(instance)
    instance.add_run_tags(run.run_id, {FAILURE_TAG: failure_code(why)})
    instance.report_run_failed(run, f"Its process was ended, and with it the steps that ran there: {sentence(why)}")
    return FAILED


def _step(instance: Any, run: Any, content: dict[str, Any]) -> int:
    from crater_dagster import _dagster
    from crater_dagster.figures import own_figures
    from crater_dagster.moving import run_goes_on

    if _attempt() > 1 and all(_dagster.has_final_event(instance, run.run_id, key) for key in content["step_keys"]):
        return DONE
    _dagster.add_to_materializations(instance, own_figures(instance))
    _dagster.hold_back_interruptions(instance, lambda: run_goes_on(instance, run.run_id))
    failed = False
    for event in _dagster.execute_step(instance, run, content):
        failed |= event.is_step_failure or event.is_step_up_for_retry
    return FAILED if failed else DONE


def _leave(code: int) -> NoReturn:
    """As any exit, except that the interpreter is not taken apart module by module: nobody waits for that."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads that are not daemons.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        ended = main()
    except Exception:
        # The event log has the story; this is for the task's own output.
        traceback.print_exc()
        ended = FAILED
    _leave(ended)
