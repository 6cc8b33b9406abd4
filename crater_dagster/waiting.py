"""Tells in a run's event log why its worker has not started yet: once for each change of the reason."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dagster import DagsterRun

from crater_core.errors import CraterError, NotFound
from crater_core.wire.tasks import TaskView
from crater_dagster.reasons import sentence, why_it_waits

LOOK_EVERY_S = 2.0
RUNS_MAX = 1000


class WaitingRuns:
    """One thread, there only while some run waits. What is not told when this process ends stays in `crater explain`."""

    def __init__(self, tell: Callable[[DagsterRun, str], None], look: Callable[[str], TaskView]) -> None:
        self._tell, self._look = tell, look
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[DagsterRun, str | None]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, run: DagsterRun, view: TaskView) -> None:
        told = self._say(run, view, None)
        with self._lock:
            if len(self._runs) >= RUNS_MAX:
                return
            self._runs[view.id] = (run, told)
            if self._thread is None or not self._thread.is_alive():
                self._stop.clear()
                self._thread = threading.Thread(target=self._follow, name="crater-waiting-runs", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            with self._lock:
                if not self._runs:
                    self._thread = None
                    return
                watched = list(self._runs.items())
            for task_id, (run, told) in watched:
                try:
                    view = self._look(task_id)
                except NotFound:
                    self._forget(task_id)
                    continue
                except CraterError:
                    continue
                if view.status != "queued":
                    self._forget(task_id)
                else:
                    self._remember(task_id, run, self._say(run, view, told))

    def _say(self, run: DagsterRun, view: TaskView, told: str | None) -> str | None:
        code = why_it_waits(view)
        if code is None or code == told:
            return told
        self._tell(run, f"The run worker waits: {sentence(view.reason)}")
        return code

    def _remember(self, task_id: str, run: DagsterRun, told: str | None) -> None:
        with self._lock:
            self._runs[task_id] = (run, told)

    def _forget(self, task_id: str) -> None:
        with self._lock:
            self._runs.pop(task_id, None)
