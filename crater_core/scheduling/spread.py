"""Replicas of a service go to different nodes first; they are never blocked when there are fewer nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crater_core.model.allocation import AllocationStatus, Placement
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling.columns import IntArray
from crater_core.scheduling.fits import NEVER, Fits

CROWDED = 1 << 30
"""Taken off a node's score for each replica it has: more than any strategy gives."""


def spread_score(fits: Fits, snapshot: Snapshot, placements: Sequence[Placement], service: str) -> IntArray:
    """The scores, less so much for each replica that a node with fewer always comes first."""
    score = fits.score.copy()
    for name, replicas in replicas_by_node(snapshot, placements, service).items():
        at = fits.columns.row_of.get(name)
        if at is not None and score[at] > NEVER:
            score[at] -= CROWDED * replicas
    return score


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
