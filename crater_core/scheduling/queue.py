"""The queue as lanes: tasks that differ only in age stand in one lane, oldest first, so that a blocked lane is looked at once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict

from crater_core.model.after import waiting_for
from crater_core.model.reason import TAKEN_FOR_ANOTHER, Reason, ReasonCode
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Array, Task, TaskSpec, TaskType
from crater_core.scheduling.shapes import Shape, ShapeFields, shape_fields
from crater_core.scheduling.spread import KeptApart, kept_apart

Place = tuple[int, str]
"""When a task entered the queue, and its id: its order inside a lane."""
Length = tuple[int | None, int | None]
"""Time limit, and without one what is foretold."""
LaneKey = tuple[int, int, str, str, str | None, KeptApart | None, tuple[int, int], Length, Array | None, Shape]


class Lane:
    """Tasks of one priority, project, user, quota policy, neighbours, size, time limit (or forecast), limited array and shape."""

    __slots__ = (
        "apart",
        "array",
        "codes",
        "control",
        "fewest",
        "foretold_ms",
        "key",
        "limit_ms",
        "members",
        "places",
        "priority",
        "project",
        "quota_policy",
        "shape",
        "user",
    )

    def __init__(self, key: LaneKey) -> None:
        self.key = key
        control, priority, self.project, self.user, self.quota_policy, self.apart, size, length = key[:8]
        self.array, self.shape = key[8:]
        self.fewest, self.members = size
        self.limit_ms, self.foretold_ms = length
        self.control, self.priority = control == 0, -priority
        self.places: list[Place] = []
        self.codes: dict[ReasonCode | None, set[str]] = defaultdict(set)
        """Its tasks by the reason that they have now."""


def lane_key(task: Task, shape: Shape) -> LaneKey:
    spec = task.spec
    return (
        0 if spec.type is TaskType.CONTROL else 1,
        -spec.priority,
        spec.project,
        spec.user,
        spec.quota_policy,
        kept_apart(spec),
        (spec.members_fewest, spec.members),
        (spec.time_limit_ms, task.foretold_ms if spec.time_limit_ms is None else None),
        spec.array if spec.array is not None and spec.array.running_max is not None else None,
        shape,
    )


def lane_of_one(task: Task, shape: Shape) -> Lane:
    """A lane with this task alone, in no queue."""
    lane = Lane(lane_key(task, shape))
    lane.places.append((task.queued_at_ms, task.id))
    return lane


class Queue:
    """Follows the snapshot's queue log, so that a cycle costs what has changed and not what waits."""

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        self.delayed: dict[str, Task] = {}
        """Queued, but not before a time that has not come."""
        self.held: dict[str, Reason] = {}
        """Queued, and why not yet: what they come after has not ended."""
        self.held_news: set[str] = set()
        """Those of them that do not have that reason yet."""
        self.preemptors: dict[str, str] = {}
        """Queued tasks that were stopped to make room, and for whom, as long as nothing else is said of them."""
        self._held_now: dict[str, Reason] | None = None
        self._shapes: dict[ShapeFields, Shape] = {}
        """One object for equal shapes, so that comparing them is quick."""
        self._at: dict[str, tuple[Lane, Place, ReasonCode | None]] = {}
        self._position = -1
        self._settings: Settings | None = None
        self._now_ms = 0

    def sync(self, snapshot: Snapshot, now_ms: int) -> None:
        start = snapshot.queue_log_start
        if self._settings is not snapshot.settings or self._position < start or now_ms < self._now_ms:
            self.lanes, self.delayed, self._at, self.preemptors, self.held, self.held_news = {}, {}, {}, {}, {}, set()
            self._held_now = None
            self._shapes.clear()
            changed = list(snapshot.queued)
        else:
            due = [task.id for task in self.delayed.values() if task.not_before_ms <= now_ms]
            changed = list(dict.fromkeys([*snapshot.queue_log[self._position - start :], *due]))
        self._settings, self._now_ms = snapshot.settings, now_ms
        self._position = start + len(snapshot.queue_log)
        self._move(snapshot, changed, now_ms)

    def held_now(self) -> dict[str, Reason]:
        """`held` as it is, for keeping: the same object until it changes."""
        if self._held_now is None:
            self._held_now = dict(self.held)
        return self._held_now

    def lane_of(self, task: str) -> Lane | None:
        found = self._at.get(task)
        return found[0] if found else None

    def _move(self, snapshot: Snapshot, changed: list[str], now_ms: int) -> None:
        leaving: dict[Lane, set[Place]] = defaultdict(set)
        joining: dict[Lane, list[Place]] = defaultdict(list)
        shapes: dict[int, Shape] = {}
        for name in changed:
            if name in self._at:
                lane, place, code = self._at.pop(name)
                leaving[lane].add(place)
                lane.codes[code].discard(name)
            self.delayed.pop(name, None)
            self.preemptors.pop(name, None)
            if self.held.pop(name, None) is not None:
                self._held_now = None
            self.held_news.discard(name)
            task = snapshot.queued.get(name)
            if task is None:
                continue
            waits = waiting_for(snapshot, task.spec) if task.spec.after else None
            if waits is not None:
                self.held[name], self._held_now = waits, None
                if task.reason is None or task.reason.code is not waits.code:
                    self.held_news.add(name)
                continue
            if task.reason is not None and task.reason.code in TAKEN_FOR_ANOTHER:
                self.preemptors[name] = str(task.reason.facts.get("by", ""))
            if task.not_before_ms > now_ms:
                self.delayed[name] = task
                continue
            # Members of an array share one spec; what has grown asks for something else.
            shape = shapes.get(id(task.spec)) if task.grown is None else self._shape_of(task.asked, snapshot.settings)
            if shape is None:
                shape = shapes[id(task.spec)] = self._shape_of(task.spec, snapshot.settings)
            key, place = lane_key(task, shape), (task.queued_at_ms, name)
            lane = self.lanes.get(key)
            if lane is None:
                lane = self.lanes[key] = Lane(key)
            joining[lane].append(place)
            code = task.reason.code if task.reason is not None else None
            lane.codes[code].add(name)
            self._at[name] = (lane, place, code)
        for lane, places in leaving.items():
            _remove(lane.places, places)
        for lane, places in joining.items():
            _insert(lane.places, places)
        for lane in leaving:
            if not lane.places:
                del self.lanes[lane.key]

    def _shape_of(self, spec: TaskSpec, settings: Settings) -> Shape:
        fields = shape_fields(spec, settings)
        found = self._shapes.get(fields)
        if found is None:
            found = self._shapes[fields] = Shape(*fields)
        return found


_FEW = 8
"""Up to this many, moving single entries is cheaper than going through the lane."""


def _remove(lane: list[Place], places: set[Place]) -> None:
    if len(places) > _FEW:
        lane[:] = [place for place in lane if place not in places]
        return
    for place in places:
        at = bisect_left(lane, place)
        assert lane[at] == place, "a lane is sorted and holds what it was given"
        del lane[at]


def _insert(lane: list[Place], places: list[Place]) -> None:
    if len(places) > _FEW:
        lane.extend(places)
        lane.sort()
        return
    for place in places:
        insort(lane, place)
