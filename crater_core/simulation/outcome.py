"""What a replay measured, and the figures made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SHORTEST_MS = 60_000
"""Shorter tasks count as this long in a slowdown: else those of a second would be all that counts."""


class Run(NamedTuple):
    """One task that finished. Times are milliseconds of the trace's own clock."""

    project: str
    at_ms: int
    wait_ms: int
    """From its arrival to its end, less the time that it runs: all its queueing, and the work that a preemption threw away."""
    runs_ms: int
    until_start_ms: int
    """From its arrival to its first start."""

    @property
    def slowdown(self) -> float:
        """From its arrival to its end, over the time that it runs."""
        return (self.wait_ms + self.runs_ms) / max(SHORTEST_MS, self.runs_ms)


class Sample(NamedTuple):
    """How things stood at one time: thousandths held of what is measured, and tasks that waited."""

    at_ms: int
    held_milli: int
    waiting: int


@dataclass(slots=True)
class Outcome:
    """What a replay measured: GPU compute, or cores on a cluster without GPUs. Ratios are over the time in which tasks came."""

    trace: str
    policy: str
    resource: str = "gpu"
    tasks: int = 0
    refused: int = 0
    finished: int = 0
    preemptions: int = 0
    lost_work_ms: int = 0
    """Milliseconds of one GPU (or core) that preemption threw away."""
    span_ms: int = 0
    runs: list[Run] = field(default_factory=lambda: [])
    held_ms: int = 0
    """Milliseconds of one GPU (or core) held while tasks still came."""
    capacity_ms: int = 0
    idle_while_waiting_ms: int = 0
    """The part of the capacity that lay free while tasks waited."""
    started_ms: dict[str, int] = field(default_factory=lambda: {})
    samples: list[Sample] = field(default_factory=lambda: [])
    capacity_milli: int = 0
    interrupted: bool = False

    @property
    def allocation_ratio(self) -> float:
        """The part of the capacity that was held."""
        return self.held_ms / self.capacity_ms if self.capacity_ms else 0.0

    @property
    def utilisation(self) -> float:
        """The part of the capacity that did work which counted: held, less what preemption threw away."""
        return max(0, self.held_ms - self.lost_work_ms) / self.capacity_ms if self.capacity_ms else 0.0

    @property
    def fragmentation(self) -> float:
        """The part of the capacity that lay free while somebody waited: no waiting task could use it, or none was let."""
        return self.idle_while_waiting_ms / self.capacity_ms if self.capacity_ms else 0.0

    @property
    def waits_ms(self) -> list[int]:
        return [run.wait_ms for run in self.runs]

    @property
    def mean_wait_ms(self) -> float:
        return sum(self.waits_ms) / len(self.runs) if self.runs else 0.0

    @property
    def mean_until_start_ms(self) -> float:
        return sum(run.until_start_ms for run in self.runs) / len(self.runs) if self.runs else 0.0

    def percentile_wait_ms(self, percent: int) -> int:
        return percentile(self.waits_ms, percent)

    @property
    def waits_of(self) -> dict[str, list[int]]:
        """By project."""
        found: dict[str, list[int]] = defaultdict(list)
        for run in self.runs:
            found[run.project].append(run.wait_ms)
        return dict(found)

    @property
    def fairness(self) -> float:
        """Jain's index over the projects' mean slowdowns: 1 is all alike, 1/n is one project bearing it all."""
        by_project: dict[str, list[float]] = defaultdict(list)
        for run in self.runs:
            by_project[run.project].append(run.slowdown)
        means = [sum(values) / len(values) for values in by_project.values()]
        return sum(means) ** 2 / (len(means) * sum(mean * mean for mean in means)) if means else 1.0


def percentile(values: Sequence[int], percent: int) -> int:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else 0


def joined(outcomes: Iterable[Outcome], trace: str, policy: str) -> Outcome:
    """Partitions of one cluster as one outcome."""
    parts = list(outcomes)
    whole = Outcome(trace, policy, parts[0].resource if parts else "gpu")
    for part in parts:
        whole.tasks += part.tasks
        whole.refused += part.refused
        whole.finished += part.finished
        whole.preemptions += part.preemptions
        whole.lost_work_ms += part.lost_work_ms
        whole.span_ms = max(whole.span_ms, part.span_ms)
        whole.runs += part.runs
        whole.held_ms += part.held_ms
        whole.capacity_ms += part.capacity_ms
        whole.capacity_milli += part.capacity_milli
        whole.idle_while_waiting_ms += part.idle_while_waiting_ms
        whole.interrupted |= part.interrupted
    whole.samples = _joined_samples([part.samples for part in parts])
    return whole


def _joined_samples(series: list[list[Sample]]) -> list[Sample]:
    """Sums, at every time at which any of them has a sample; each holds its last value until its next."""
    moments = sorted({sample.at_ms for samples in series for sample in samples})
    places = [0] * len(series)
    found: list[Sample] = []
    for moment in moments:
        held = waiting = 0
        for index, samples in enumerate(series):
            while places[index] < len(samples) and samples[places[index]].at_ms <= moment:
                places[index] += 1
            if places[index]:
                held += samples[places[index] - 1].held_milli
                waiting += samples[places[index] - 1].waiting
        found.append(Sample(moment, held, waiting))
    return found
