"""Replicas of a service go to different nodes first; they are never blocked when there are fewer nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crater_core.model.allocation import AllocationStatus, Placement
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling.fits import NEVER, Fits

CROWDED = 1 << 30
"""Taken off a node's score for each replica it has: more than any strategy gives."""


def best_spread(fits: Fits, snapshot: Snapshot, placements: Sequence[Placement], service: str) -> int:
    """The best row among those with the fewest replicas; -1 when none fits."""
    row = fits.best()
    if row < 0:
        return row
    score = fits.score.copy()
    for name, replicas in replicas_by_node(snapshot, placements, service).items():
        at = fits.columns.row_of.get(name)
        if at is not None and score[at] > NEVER:
            score[at] -= CROWDED * replicas
    return int(score.argmax())


def replicas_by_node(snapshot: Snapshot, placements: Sequence[Placement], service: str) -> Counter[str]:
    tasks = snapshot.by_service.get(service, set())
    counts: Counter[str] = Counter(
        allocation.node
        for task in tasks
        for allocation in snapshot.by_task.get(task, {}).values()
        if allocation.status is not AllocationStatus.STOPPING
    )
    counts.update(placement.node for placement in placements if placement.task in tasks)
    return counts
