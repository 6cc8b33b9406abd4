"""Who would rather not, or must not, share a node: replicas of a service, members of a gang, tasks of one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crater_core.model.allocation import AllocationStatus, Placement
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Apart, TaskSpec
from crater_core.scheduling.columns import IntArray
from crater_core.scheduling.fits import NEVER, Fits

CROWDED = 1 << 30
"""Taken off a node's score for each one that is there already: more than any strategy gives."""


@dataclass(frozen=True, slots=True)
class KeptApart:
    """From whom the tasks of a lane keep away. Replicas are never blocked when there are fewer nodes."""

    service: str | None = None
    group: str | None = None
    others: Apart = Apart.NO
    """Tasks of the group."""
    members: Apart = Apart.NO
    """Members of its own gang."""


def kept_apart(spec: TaskSpec) -> KeptApart | None:
    members = spec.spread if spec.members > 1 else Apart.NO
    others = spec.anti_affinity if spec.group is not None else Apart.NO
    if spec.service is None and members is Apart.NO and others is Apart.NO:
        return None
    return KeptApart(spec.service, spec.group if others is not Apart.NO else None, others, members)


def whom(apart: KeptApart) -> str:
    return f"another task of group {apart.group}" if apart.group is not None else "a member of the same gang"


class Neighbours:
    """How many of a service or a group are on each node, in one cycle."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._counted: dict[tuple[str, str], tuple[Counter[str], int]] = {}
        """By kind and name: how many on each node, and how many placements of the cycle are among them."""

    def score(self, fits: Fits, apart: KeptApart, placements: Sequence[Placement], first: int) -> IntArray:
        """The scores, less so much for each neighbour that a node with fewer comes first, and without the nodes that are
        barred. `placements` are those of the cycle; from `first` on they are the task's own."""
        score = fits.score.copy()
        for name, count, rule in self._crowds(apart, placements, first):
            row = fits.columns.row_of.get(name)
            if row is not None and score[row] > NEVER:
                score[row] = NEVER if rule is Apart.REQUIRE else score[row] - CROWDED * count
        return score

    def barred(self, fits: Fits, apart: KeptApart, placements: Sequence[Placement], first: int) -> set[int]:
        """The rows that it must not have, whatever is free there."""
        crowds = self._crowds(apart, placements, first)
        rows = (fits.columns.row_of.get(name) for name, _, rule in crowds if rule is Apart.REQUIRE)
        return {row for row in rows if row is not None}

    def why_none(self, fits: Fits, apart: KeptApart, placements: Sequence[Placement], first: int) -> Reason | None:
        """Set when it fits some nodes, and all of them are barred."""
        with_room = {int(row) for row in (fits.score > NEVER).nonzero()[0]}
        if not with_room or with_room - self.barred(fits, apart, placements, first):
            return None
        return Reason.of(ReasonCode.KEPT_APART, nodes=len(with_room), whom=whom(apart))

    def _crowds(self, apart: KeptApart, placements: Sequence[Placement], first: int) -> Iterator[tuple[str, int, Apart]]:
        if apart.service is not None:
            for name, count in self._of("service", apart.service, placements, first).items():
                yield name, count, Apart.PREFER
        if apart.group is not None:
            for name, count in self._of("group", apart.group, placements, first).items():
                yield name, count, apart.others
        if apart.members is not Apart.NO:
            for name, count in Counter(placement.node for placement in placements[first:]).items():
                yield name, count, apart.members

    def _of(self, kind: str, name: str, placements: Sequence[Placement], first: int) -> Counter[str]:
        snapshot = self._snapshot
        index = snapshot.by_service if kind == "service" else snapshot.by_group
        tasks = index.get(name, set[str]())
        counts, seen = self._counted.get((kind, name), (None, 0))
        if counts is None:
            counts = Counter(
                allocation.node
                for task in tasks
                for allocation in snapshot.by_task.get(task, {}).values()
                # A replica that is being stopped has its successor already; a task of a group still runs there.
                if kind == "group" or allocation.status is not AllocationStatus.STOPPING
            )
        # Placements before `first` are settled; later ones may still be undone.
        counts.update(placement.node for placement in placements[seen:first] if placement.task in tasks)
        self._counted[kind, name] = counts, first
        return counts
