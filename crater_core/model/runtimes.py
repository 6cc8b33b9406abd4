"""How long tasks of one kind have run: what is foretold of the next one that names no time limit.

A kind is, from narrow to wide: the same step of the same Dagster job (with its partition, where one is told), else the same
name of the same project and user. Bounded, and fed by tasks that succeeded; nothing else is learned from.
"""

from __future__ import annotations

from crater_core.model.task import Task, TaskSpec, TaskStatus, TaskType

KINDS_MAX = 10_000
RUNS_KEPT = 5
_STEP = ("dagster/job", "dagster/step_key", "dagster/partition")
_ROUND_UP = 5, 4
"""Foretold times are a ladder whose rungs are a quarter apart, so that tasks of nearly one length stand in one lane."""

Kind = tuple[str, ...]


class RunTimes:
    """The newest run times of each kind, of the kinds seen last."""

    __slots__ = ("_runs",)

    def __init__(self, runs: dict[Kind, tuple[int, ...]] | None = None) -> None:
        self._runs = dict(runs or {})

    def learn(self, task: Task) -> None:
        """Take in an ended task. Only a success says how long the work takes."""
        if task.status is not TaskStatus.SUCCEEDED or task.started_at_ms is None or task.ended_at_ms is None:
            return
        if task.spec.service is not None or task.spec.type is TaskType.CONTROL:
            return
        ran_ms = max(1, task.ended_at_ms - task.started_at_ms)
        for kind in _kinds(task.spec):
            before = self._runs.pop(kind, ())
            self._runs[kind] = (*before[1 - RUNS_KEPT :], ran_ms)
        while len(self._runs) > KINDS_MAX:
            self._runs.pop(next(iter(self._runs)))

    def foretell(self, spec: TaskSpec) -> int | None:
        """Milliseconds, rounded up: the mean of the two newest runs of its kind. None for a kind that never ended, and for
        what has no end of its own: replicas and control tasks.

        Two, because users change what they run: Tsafrir, Etsion and Feitelson (IEEE TPDS 18(6), 2007) found the mean of a
        user's last two jobs to foretell the next one better than longer histories do.
        """
        if spec.service is not None or spec.type is TaskType.CONTROL:
            return None
        for kind in _kinds(spec):
            runs = self._runs.get(kind)
            if runs:
                newest = runs[-2:]
                return rung(sum(newest) // len(newest))
        return None

    def copy(self) -> RunTimes:
        return RunTimes(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunTimes) and self._runs == other._runs

    __hash__ = None  # type: ignore[assignment]


def _kinds(spec: TaskSpec) -> tuple[Kind, ...]:
    wide: Kind = ("name", spec.project, spec.user, spec.name)
    if "dagster/step_key" not in spec.labels:
        return (wide,)
    return (("step", spec.project, *(spec.labels.get(label, "") for label in _STEP)), wide)


def rung(ms: int) -> int:
    """The next step of the ladder of run times."""
    up, down = _ROUND_UP
    rung = 1000
    while rung < ms:
        rung = rung * up // down
    return rung
