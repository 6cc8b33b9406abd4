"""What `explain` says of room that is reserved in advance, kept for the first in line, or being made for another."""

from __future__ import annotations

from dataclasses import replace

from builders import a_node, a_snapshot, a_spec, a_task, commit

from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.reservation import Reservation, ReservedPart
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling import explain, explain_spec, schedule

HOUR = 3_600_000


def rejections(snapshot: Snapshot, task: str, now_ms: int) -> dict[str, Reason | None]:
    return {one.node: one.rejection for one in explain(snapshot, task, now_ms).candidates}


def reserved(snapshot: Snapshot) -> Snapshot:
    parts = (ReservedPart("n1", gpus=1),)
    snapshot.advance([Reservation("exam", "vision", HOUR, 2 * HOUR, gpus=1, parts=parts)])
    return snapshot


def test_a_node_that_another_project_has_reserved_says_so() -> None:
    snapshot = reserved(a_snapshot([a_node(gpus=1)], [a_task("long", gpu=1000, project="ads")]))
    barred = Reason(ReasonCode.RESERVED, {"reservation": "exam", "project": "vision", "wait_ms": 2 * HOUR})
    assert rejections(snapshot, "long", 0) == {"n1": barred}
    assert explain(snapshot, "long", 0).reason == barred
    assert explain_spec(snapshot, a_spec(gpu=1000, project="ads"), 0).reason == barred


def test_whoever_is_gone_before_the_reservation_begins_may_have_the_node() -> None:
    snapshot = reserved(a_snapshot([a_node(gpus=1)]))
    told = explain_spec(snapshot, a_spec(gpu=1000, project="ads", time_limit_ms=HOUR // 2), 0)
    assert (told.reason, told.candidates[0].rejection) == (None, None)
    assert explain_spec(snapshot, a_spec(gpu=1000, project="vision"), 0).reason is None


def with_a_head() -> Snapshot:
    """One of two GPUs is taken for an hour, the first in line wants both, and a third task would fit beside."""
    snapshot = a_snapshot([a_node(gpus=2)], [a_task("running", gpu=1000, time_limit_ms=HOUR)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("head", gpu=2000, at_ms=1), a_task("long", gpu=1000, at_ms=2, time_limit_ms=2 * HOUR)])
    return snapshot


def test_a_node_kept_for_the_first_in_line_names_whom_it_is_kept_for() -> None:
    snapshot = with_a_head()
    kept = Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="head")
    assert rejections(snapshot, "long", 3) == {"n1": kept}
    assert explain(snapshot, "long", 3).reason == kept == schedule(snapshot, 3).waiting["long"]
    head = rejections(snapshot, "head", 3)["n1"]
    assert head is not None
    assert head.code is ReasonCode.GPU_SHORT


def test_whoever_stands_behind_one_of_its_own_kind_hears_what_that_one_waits_for() -> None:
    snapshot = with_a_head()
    snapshot.advance([a_task("head", gpu=2000, at_ms=1, priority=50), a_task("next", name="head", gpu=2000, at_ms=4)])
    assert explain(snapshot, "next", 5).reason == schedule(snapshot, 5).waiting["next"]
    assert explain(snapshot, "next", 5).position == 3


def test_room_that_is_being_made_for_another_is_told_as_kept() -> None:
    snapshot = a_snapshot([a_node(gpus=2)], [a_task("low", gpu=2000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("urgent", gpu=1000, priority=90, strategy="preemptive", at_ms=1)])
    plan = schedule(snapshot, HOUR)
    assert [one.preemptor for one in plan.preemptions] == ["urgent"]
    going = snapshot.allocations[plan.preemptions[0].victim]
    because = Reason.of(ReasonCode.PREEMPTED, by="urgent")
    snapshot.advance([replace(going, status=AllocationStatus.STOPPING, reason=because), a_task("small", cpu=500, at_ms=2)])
    assert explain(snapshot, "urgent", HOUR + 1).reason == Reason.of(ReasonCode.WAITING_FOR_PREEMPTION, victims=1)
    assert rejections(snapshot, "small", HOUR + 1) == {"n1": Reason.of(ReasonCode.HELD_FOR_ANOTHER, holder="urgent")}


def test_an_explanation_leaves_the_next_plan_as_it_was() -> None:
    snapshot, untouched = with_a_head(), with_a_head()
    for task in ("head", "long", "running"):
        explain(snapshot, task, 3)
    assert schedule(snapshot, HOUR + 1) == schedule(untouched, HOUR + 1)
