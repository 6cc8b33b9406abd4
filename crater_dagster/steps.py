"""The steps of one run as tasks of the scheduler: submits, follows, explains and ends them. Knows nothing of Dagster's loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from crater_core.client import CraterClient
from crater_core.errors import Conflict, CraterError, Denied, InvalidRequest, Unavailable
from crater_core.wire.base import ReasonView
from crater_core.wire.tasks import TaskSubmission, TaskView

POLL_S = 0.5
BATCH_MAX = 500
Key = tuple[str, int]
"""Step key and retry number: one attempt, as Dagster counts them."""


@dataclass
class StepTask:
    """One attempt of a step. `view` is None until the scheduler has it."""

    key: Key
    submission: TaskSubmission | None = None
    """None for one that an earlier run worker submitted, or that cannot even be asked for."""
    idempotency_key: str = ""
    view: TaskView | None = None
    refused: CraterError | None = None
    settled: bool = False
    """Its end has been taken in by Dagster."""
    told_to_stop: bool = False

    @property
    def ended(self) -> bool:
        return self.refused is not None or (self.view is not None and self.view.ended)

    @property
    def reason(self) -> ReasonView | None:
        if self.refused is not None:
            reason = self.refused.fields.get("reason")
            code = reason if isinstance(reason, str) else self.refused.code
            return ReasonView(code=code, message=self.refused.message)
        return self.view.reason if self.view else None


class StepTasks:
    """All step tasks of one run. Its client asks once and does not retry, so that the caller's loop goes on meanwhile."""

    def __init__(
        self, client: CraterClient, group: str, labels: Mapping[str, str], tell: Callable[[Key, TaskView, TaskView | None], None]
    ) -> None:
        self._client, self._group, self._labels, self._tell = client, group, dict(labels), tell
        self._tasks: dict[Key, StepTask] = {}
        self._by_id: dict[str, StepTask] = {}
        self._outbox: list[StepTask] = []
        self._revision = 0
        self.launches: dict[Key, int] = {}
        """How many tasks each attempt has had: a new one needs a key of its own."""
        self.unreachable: str = ""
        """Why no scheduler answered when it was last asked; empty when one did."""
        self._unreachable_since_s: float | None = None

    # Known attempts

    def get(self, key: Key) -> StepTask | None:
        return self._tasks.get(key)

    def in_flight(self) -> bool:
        """Whether there is a task of which Dagster has not seen the end."""
        return any(not task.settled for task in self._tasks.values())

    def unsettled(self) -> bool:
        """Whether there is such a task that has ended."""
        return any(task.ended and not task.settled for task in self._tasks.values())

    def settle(self, step_key: str) -> None:
        """The step's attempts so far have ended in the event log; their processes may take a moment longer."""
        for key, task in self._tasks.items():
            if key[0] == step_key:
                task.settled = True

    def ending(self) -> list[tuple[Key, TaskView]]:
        """Those whose process is not known to have ended, though Dagster has seen the step's end, or asked for it."""
        return [
            (key, task.view)
            for key, task in self._tasks.items()
            if task.view is not None and not task.ended and (task.settled or task.told_to_stop)
        ]

    def unreachable_s(self) -> float:
        return time.monotonic() - self._unreachable_since_s if self._unreachable_since_s is not None else 0.0

    def find_earlier(self, patient: CraterClient) -> None:
        """Take over what an earlier run worker of this run has submitted. Raises Unavailable."""
        for view in reversed(list(patient.tasks(group=self._group, labels=self._labels))):
            key = (view.labels.get("dagster/step_key", ""), int(view.labels.get("dagster/retry", "0")))
            self.launches[key] = self.launches.get(key, 0) + 1
            self._tasks[key] = self._by_id[view.id] = StepTask(key, view=view)

    # Submitting

    def put(self, key: Key, submission: TaskSubmission, idempotency_key: str) -> StepTask:
        """Takes effect with the next `flush`."""
        self.launches[key] = self.launches.get(key, 0) + 1
        task = StepTask(key, submission, idempotency_key)
        self._tasks[key] = task
        self._outbox.append(task)
        return task

    def refuse(self, key: Key, error: CraterError) -> None:
        """The attempt cannot even be asked for."""
        self._tasks[key] = StepTask(key, refused=error)

    def flush(self) -> None:
        """Submit what is in the outbox, together. What no scheduler takes now stays there for the next time."""
        try:
            while self._outbox:
                batch = self._outbox[:BATCH_MAX]
                try:
                    asked = [task.submission for task in batch if task.submission is not None]
                    views = self._client.submit_many(asked, [task.idempotency_key for task in batch])
                except (InvalidRequest, Denied, Conflict):
                    # One of them is at fault, and the call is all or nothing: alone each gets its own answer.
                    for task in batch:
                        self._submit_alone(task)
                        self._outbox.remove(task)
                else:
                    for task, view in zip(batch, views, strict=True):
                        self._take(task, view)
                    del self._outbox[: len(batch)]
                self._back()
        except Unavailable as error:
            self._away(error)

    def _submit_alone(self, task: StepTask) -> None:
        assert task.submission is not None, "only what has a submission is in the outbox"
        try:
            self._take(task, self._client.submit(task.submission, idempotency_key=task.idempotency_key))
        except Unavailable:
            raise
        except CraterError as error:
            task.refused = error

    def _take(self, task: StepTask, view: TaskView) -> None:
        before, task.view = task.view, view
        self._by_id[view.id] = task
        self._tell(task.key, view, before)

    # Following

    def follow(self, wait_s: float = POLL_S) -> bool:
        """Hear what has changed, waiting for it up to `wait_s`; True when something did."""
        self.flush()
        try:
            changes = self._client.changes(self._revision, group=self._group, wait_s=wait_s)
        except Unavailable as error:
            self._away(error)
            time.sleep(wait_s)
            return False
        self._back()
        self._revision = changes.revision
        mine = [(self._by_id[view.id], view) for view in changes.tasks if view.id in self._by_id]
        for task, view in mine:
            if task.view is None or view.revision >= task.view.revision:
                self._take(task, view)
        return bool(mine)

    def _away(self, error: CraterError) -> None:
        self.unreachable = error.message
        self._unreachable_since_s = self._unreachable_since_s or time.monotonic()

    def _back(self) -> None:
        self.unreachable, self._unreachable_since_s = "", None

    # Ending

    def cancel(self, key: Key, why: str) -> None:
        task = self._tasks.get(key)
        if task is None or task.ended:
            return
        if task in self._outbox:
            self._outbox.remove(task)
            task.refused = InvalidRequest("it was cancelled before it was submitted", reason="cancelled")
        elif task.view is not None:
            task.told_to_stop = True
            self._take(task, self._client.cancel(task.view.id, why))
