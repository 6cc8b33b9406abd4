"""Why a task waits or where it would go: every node with its score or the first thing amiss, and its place in the queue."""

from __future__ import annotations

from bisect import bisect_left

from crater_core.errors import NotFound
from crater_core.model.plan import Candidate, Explanation, Refused
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.scheduling.admission import admit
from crater_core.scheduling.cycle import Cycle
from crater_core.scheduling.diagnosis import Rejections
from crater_core.scheduling.endings import expected_end
from crater_core.scheduling.fairness import Shares
from crater_core.scheduling.fits import NEVER
from crater_core.scheduling.memory import Memory, memory_of
from crater_core.scheduling.order import Ranks
from crater_core.scheduling.queue import Lane, lane_of_one
from crater_core.scheduling.shapes import shape_of
from crater_core.scheduling.spread import whom
from crater_core.scheduling.strategies import STRATEGIES
from crater_core.scheduling.waiting import backing_off


def explain(snapshot: Snapshot, task_id: str, now_ms: int) -> Explanation:
    """Explain a live task as things stand: a queued one as it will find them when its turn comes. Raises `NotFound` for one that
    is not (or no longer) there.
    """
    task = snapshot.tasks.get(task_id)
    if task is None:
        raise NotFound(f"no live task {task_id}", task=task_id)
    memory = memory_of(snapshot)
    memory.queue.sync(snapshot, now_ms)
    cycle = Cycle(snapshot, memory, now_ms)
    if task.status is not TaskStatus.QUEUED:
        return _explain(cycle, task, task.reason, None)
    position = _position(snapshot, memory, task, now_ms)
    reason = memory.queue.held.get(task_id)
    lane = memory.queue.lane_of(task_id)
    if reason is None and lane is None:
        reason = backing_off(task, now_ms)
    if lane is None:
        return _explain(cycle, task, reason, position)
    cycle.run_up_to(task_id)
    candidates = _candidates(cycle, lane, task_id)
    waits = cycle.why_not_now(lane, task_id) or Reason.of(ReasonCode.NOT_YET_LOOKED_AT)
    return Explanation(task_id, lane.shape.strategy, waits, candidates, position)


def explain_spec(snapshot: Snapshot, spec: TaskSpec, now_ms: int) -> Explanation:
    """What would become of a task with this spec, without submitting it, were it the first in line. No reason means that it could
    start now.
    """
    memory = memory_of(snapshot)
    memory.queue.sync(snapshot, now_ms)
    shape = shape_of(spec, snapshot.settings)
    admission = admit(spec, snapshot)
    if isinstance(admission, Refused):
        return Explanation("", shape.strategy, admission.reason)
    task = Task("", spec, TaskStatus.QUEUED, now_ms, now_ms)
    cycle = Cycle(snapshot, memory, now_ms)
    reason = cycle.why_not_now(lane_of_one(task, shape), "")
    return _explain(cycle, task, reason, None)


def _explain(cycle: Cycle, task: Task, reason: Reason | None, position: int | None) -> Explanation:
    lane = lane_of_one(task, shape_of(task.asked, cycle.snapshot.settings))
    return Explanation(task.id, lane.shape.strategy, reason, _candidates(cycle, lane, task.id), position)


def _candidates(cycle: Cycle, lane: Lane, task: str) -> tuple[Candidate, ...]:
    """Every node with its score, or what is amiss with it first: what it lacks, whom it keeps away from, for whom it is kept."""
    if lane.shape.strategy not in STRATEGIES:
        return ()
    fits, apart, keeping = cycle.memory.fits(lane.shape), lane.apart, cycle.keeping
    fits.refresh()
    barred = cycle.neighbours.barred(fits, apart, cycle.placements, len(cycle.placements)) if apart is not None else set[int]()
    ending = expected_end(cycle.now_ms, lane.limit_ms, lane.foretold_ms)
    rejections, names, scores = Rejections(fits, cycle.now_ms), fits.columns.names, fits.score.tolist()

    def verdict(row: int, score: int) -> Candidate:
        if score <= NEVER:
            return Candidate(names[row], rejection=rejections.of(row))
        if apart is not None and row in barred:
            return Candidate(names[row], rejection=Reason.of(ReasonCode.SPREAD, whom=whom(apart)))
        kept = keeping.why_barred(fits, row, task, lane.project, ending)
        return Candidate(names[row], rejection=kept) if kept is not None else Candidate(names[row], score=float(score))

    return tuple(verdict(row, score) for row, score in enumerate(scores))


def _position(snapshot: Snapshot, memory: Memory, task: Task, now_ms: int) -> int | None:
    mine = memory.queue.lane_of(task.id)
    if mine is None:
        return None
    shares = Shares(memory.columns, memory.columns.held_in_all, snapshot.settings, snapshot.past, now_ms)
    ranks, place, share = Ranks(snapshot.settings, now_ms), (task.queued_at_ms, task.id), shares.of(mine.project)
    rank, ahead = ranks.of(mine, place), 0
    for lane in memory.queue.lanes.values():
        before, equal = ranks.ahead_in(lane, rank)
        other = shares.of(lane.project)
        if other < share:
            ahead += equal
        else:
            here = (place[0] + ranks.later_ms(mine) - ranks.later_ms(lane), place[1])
            ahead += before if other > share else min(max(before, bisect_left(lane.places, here)), equal)
    return ahead + 1
