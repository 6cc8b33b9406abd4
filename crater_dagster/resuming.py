"""What a run worker that takes over knows of the run: Dagster's own record of its steps, rebuilt from the event log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from crater_dagster._dagster import FINAL_STEP_EVENTS, ActiveExecution, DagsterEvent, DagsterEventType, pool_of_step


class ResumableExecution(ActiveExecution):
    """Dagster's own replay asks its limits again, waits out delays of retries that are over, and refuses skipped steps; a run
    that any of these had a part in cannot be resumed by it. What is in the log has happened, so that here nothing is asked.
    """

    def rebuild_from_events(self, dagster_events: Sequence[DagsterEvent]) -> Sequence[Any]:
        """The steps that may be running: handed out, and without an end so far."""
        handed_out = set[str]()
        with self._without_limits():
            self.get_steps_to_execute()
            for event in dagster_events:
                self._replay(event, handed_out)
                self.get_steps_to_execute()
        never = [key for key in self._in_flight if key not in handed_out]
        self._in_flight.difference_update(never)
        self._executable.extend(sorted(never))
        running = [self.get_step_by_key(key) for key in sorted(self._in_flight)]
        if self._instance_concurrency_context is not None:
            # Their slots are this run's already; they are given back when it is known to hold them.
            self._instance_concurrency_context._claims.update(step.key for step in running if pool_of_step(step))
        return running

    def _replay(self, event: DagsterEvent, handed_out: set[str]) -> None:
        key = event.step_key
        if event.event_type is DagsterEventType.STEP_WORKER_STARTING and key is not None:
            handed_out.add(key)
            if key in self._waiting_to_retry:
                self._waiting_to_retry[key] = 0.0
        elif event.event_type is DagsterEventType.STEP_SKIPPED and key in self._pending_skip:
            self._pending_skip.remove(key)
            self._in_flight.add(key)
            self._skip_for_dynamic_outputs(self.get_step_by_key(key))
            self.mark_skipped(key)
        elif event.event_type is not DagsterEventType.STEP_SKIPPED:
            if event.event_type in FINAL_STEP_EVENTS:
                handed_out.discard(key or "")
            self.handle_event(event)
        for step in self.get_steps_to_abandon():
            self.mark_abandoned(step.key)

    @contextlib.contextmanager
    def _without_limits(self) -> Iterator[None]:
        limits = self._max_concurrent, self._tag_concurrency_limits, self._instance_concurrency_context
        self._max_concurrent, self._tag_concurrency_limits, self._instance_concurrency_context = None, [], None
        try:
            yield
        finally:
            self._max_concurrent, self._tag_concurrency_limits, self._instance_concurrency_context = limits
