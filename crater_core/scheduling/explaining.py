"""Why a task waits or where it would go: every node with its score or the first thing amiss, and its place in the queue."""

from __future__ import annotations

from bisect import bisect_left

from crater_core.errors import NotFound
from crater_core.model.allocation import Placement
from crater_core.model.plan import Candidate, Explanation, Refused
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskSpec, TaskStatus, TaskType
from crater_core.scheduling.admission import admit
from crater_core.scheduling.arrays import array_full
from crater_core.scheduling.diagnosis import Rejections, why_nothing_fits
from crater_core.scheduling.fairness import Shares
from crater_core.scheduling.fits import NEVER, Fits
from crater_core.scheduling.guarantees import Guarantees
from crater_core.scheduling.ledger import Ledger
from crater_core.scheduling.memory import Memory, memory_of
from crater_core.scheduling.order import Ranks
from crater_core.scheduling.quotas import QuotaBook, held_of, listed
from crater_core.scheduling.shapes import shape_of
from crater_core.scheduling.spread import Neighbours, kept_apart, whom
from crater_core.scheduling.strategies import STRATEGIES
from crater_core.scheduling.waiting import backing_off


def explain(snapshot: Snapshot, task_id: str, now_ms: int) -> Explanation:
    """Explain a live task as things stand. Raises `NotFound` for one that is not (or no longer) there."""
    task = snapshot.tasks.get(task_id)
    if task is None:
        raise NotFound(f"no live task {task_id}", task=task_id)
    memory = memory_of(snapshot)
    memory.queue.sync(snapshot, now_ms)
    if task.status is not TaskStatus.QUEUED:
        return _explain(snapshot, memory, task.asked, task_id, task.reason, None, now_ms)
    reason = memory.queue.held.get(task_id)
    if reason is None:
        reason = backing_off(task, now_ms) if task.not_before_ms > now_ms else _why(snapshot, memory, task.asked)
    waits = reason or Reason.of(ReasonCode.NOT_YET_LOOKED_AT)
    return _explain(snapshot, memory, task.asked, task_id, waits, _position(snapshot, memory, task, now_ms), now_ms)


def explain_spec(snapshot: Snapshot, spec: TaskSpec, now_ms: int) -> Explanation:
    """What would become of a task with this spec, without submitting it. No reason means that it could start now."""
    memory = memory_of(snapshot)
    admission = admit(spec, snapshot)
    if isinstance(admission, Refused):
        return Explanation("", shape_of(spec, snapshot.settings).strategy, admission.reason)
    return _explain(snapshot, memory, spec, "", _why(snapshot, memory, spec), None, now_ms)


def _why(snapshot: Snapshot, memory: Memory, spec: TaskSpec) -> Reason | None:
    """Why a task of this spec cannot start now; None when it can."""
    shape = shape_of(spec, snapshot.settings)
    if shape.strategy not in STRATEGIES:
        return Reason.of(ReasonCode.UNKNOWN_STRATEGY, strategy=shape.strategy, known=listed(STRATEGIES))
    if spec.type is not TaskType.CONTROL:
        book = QuotaBook(snapshot.policies, memory.columns.held_in_all)
        wanted = held_of(spec.request.amounts.times(spec.members_fewest))
        guarantees = Guarantees(snapshot, book, memory.columns)
        refusal = book.refusal(spec.project, spec.user, spec.quota_policy, wanted)
        refusal = refusal or guarantees.refusal(spec.project, spec.quota_policy, wanted)
        if refusal is not None:
            return refusal
    if spec.array is not None and (full := array_full(snapshot, spec.array)):
        return full
    fits = memory.fits(shape)
    if fits.best() < 0:
        return why_nothing_fits(snapshot, fits)
    return _why_not_together(snapshot, memory, fits, spec)


def _why_not_together(snapshot: Snapshot, memory: Memory, fits: Fits, spec: TaskSpec) -> Reason | None:
    """Why not all members find room, or none where it may be; None when they do."""
    apart, members = kept_apart(spec), spec.members_fewest
    if apart is None and members == 1:
        return None
    ledger, neighbours, placed, reason = Ledger(memory.columns), Neighbours(snapshot), list[Placement](), None
    mark = ledger.mark()
    while len(placed) < members:
        fits.refresh()
        score = fits.score if apart is None else neighbours.score(fits, apart, placed, 0)
        row = int(score.argmax())
        if score[row] <= NEVER:
            none_open = neighbours.why_none(fits, apart, placed, 0) if apart is not None and not placed else None
            reason = none_open or Reason.of(ReasonCode.WAITING_FOR_GANG, placed=len(placed), members=members)
            break
        placed.append(ledger.take(fits, row, "", len(placed)))
    ledger.rollback(mark)
    return reason


def _explain(
    snapshot: Snapshot, memory: Memory, spec: TaskSpec, task: str, reason: Reason | None, position: int | None, now_ms: int
) -> Explanation:
    shape = shape_of(spec, snapshot.settings)
    if shape.strategy not in STRATEGIES:
        return Explanation(task, shape.strategy, reason, (), position)
    fits = memory.fits(shape)
    fits.refresh()
    apart = kept_apart(spec)
    barred = Neighbours(snapshot).barred(fits, apart, [], 0) if apart is not None else set[int]()
    rejections, names, scores = Rejections(fits, now_ms), fits.columns.names, fits.score.tolist()

    def verdict(row: int, score: int) -> Candidate:
        if score <= NEVER:
            return Candidate(names[row], rejection=rejections.of(row))
        if apart is not None and row in barred:
            return Candidate(names[row], rejection=Reason.of(ReasonCode.SPREAD, whom=whom(apart)))
        return Candidate(names[row], score=float(score))

    candidates = tuple(verdict(row, score) for row, score in enumerate(scores))
    return Explanation(task, shape.strategy, reason, candidates, position)


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
