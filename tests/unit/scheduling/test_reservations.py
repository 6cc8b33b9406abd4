"""Advance reservations: chosen with numbers, and seen by every strategy before and in their time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import a_node, a_snapshot, a_task, commit

from crater_core.lifecycle import apply
from crater_core.lifecycle.inputs import Planned, ReservationCancelled, ReservationMade, ReservationMoved, Tick
from crater_core.model.node import Node, NodeStatus, SharingMode
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.reservation import Reservation, ReservedPart
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling import STRATEGIES, find_parts, moved_reservations, schedule

HOUR_MS = 3_600_000


def sliced(name: str = "mig", count: int = 7) -> Node:
    model = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    return a_node(name, gpus=count, model=model, sharing=SharingMode.MIG, gpu_memory_mib=4_864, card_milli=142)


def a_reservation(name: str = "r1", project: str = "ml", gpus: int = 2, from_ms: int = HOUR_MS, **more: Any) -> Reservation:
    return Reservation(name, project, from_ms, more.pop("to_ms", from_ms + HOUR_MS), gpus, **more)


def reserved(snapshot: Snapshot, *wanted: Reservation) -> Snapshot:
    for one in wanted:
        parts = find_parts(snapshot, one)
        assert not isinstance(parts, Reason), sentence(parts)
        made = ReservationMade(Reservation(**{**{f: getattr(one, f) for f in one.__slots__}, "parts": parts}))
        snapshot.advance(apply(snapshot, made, 0).puts)
    return snapshot


def gpu_task(id: str = "t1", gpus: int = 1, **more: Any) -> Any:
    return a_task(id, gpu=1000 * gpus, cpu=0, memory_gib=0, **more)


def placed(snapshot: Snapshot, now_ms: int) -> dict[str, str]:
    return {placement.task: placement.node for placement in schedule(snapshot, now_ms).placements}


def test_the_parts_are_on_as_few_nodes_as_will_be_empty() -> None:
    snapshot = a_snapshot([a_node("a", gpus=4), a_node("b", gpus=2), a_node("c", gpus=4)], [gpu_task("runs", 3)])
    commit(snapshot, schedule(snapshot, 0))
    busy = next(iter(snapshot.allocations.values())).node
    parts = find_parts(snapshot, a_reservation(gpus=4, cpu_milli=4000))
    assert isinstance(parts, tuple)
    assert [(part.gpus, part.cpu_milli) for part in parts] == [(4, 4000)]
    assert parts[0].node != busy


def test_what_cannot_be_reserved_is_refused_with_the_numbers() -> None:
    snapshot = reserved(a_snapshot([a_node("a", gpus=4), a_node("b", gpus=2, labels={"rack": "1"})]), a_reservation(gpus=3))
    reason = find_parts(snapshot, a_reservation("r2", gpus=4))
    assert reason == Reason(ReasonCode.CANNOT_RESERVE, {"resource": "gpu", "wanted": 4000, "largest": 3000, "kept": 3000})
    assert isinstance(find_parts(snapshot, a_reservation("r2", gpus=6, from_ms=2 * HOUR_MS)), tuple), "another time"
    assert isinstance(find_parts(snapshot, a_reservation("r2", gpus=1, gpu_types=("h100",))), Reason)
    assert find_parts(snapshot, a_reservation("r2", gpus=2, node_labels={"rack": "1"})) == (ReservedPart("b", 2),)


def test_a_reservation_above_the_projects_quota_is_refused() -> None:
    snapshot = a_snapshot([a_node(gpus=4)], (), [QuotaPolicy("q", ("ml",), Limits(gpu_milli=2000))])
    reason = find_parts(snapshot, a_reservation(gpus=3))
    assert isinstance(reason, Reason)
    assert reason.code is ReasonCode.LARGER_THAN_QUOTA


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_before_its_time_only_what_will_have_ended_may_use_the_room(strategy: str) -> None:
    snapshot = reserved(a_snapshot([a_node("a", gpus=2)]), a_reservation(gpus=2))
    snapshot.advance([gpu_task("long", time_limit_ms=HOUR_MS + 1, strategy=strategy), gpu_task("open", strategy=strategy)])
    plan = schedule(snapshot, 0)
    assert plan.placements == ()
    assert plan.waiting["open"].code is ReasonCode.RESERVED
    assert "reserved for project ml" in sentence(plan.waiting["open"])
    snapshot.advance([gpu_task("short", time_limit_ms=HOUR_MS, strategy=strategy)])
    assert placed(snapshot, 0) == {"short": "a"}


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_in_its_time_only_its_project_uses_the_room_and_then_all_may(strategy: str) -> None:
    snapshot = reserved(a_snapshot([a_node("a", gpus=2), a_node("b", gpus=1)]), a_reservation(gpus=2))
    snapshot.advance([gpu_task(f"other{i}", at_ms=i, time_limit_ms=1000, strategy=strategy) for i in range(3)])
    snapshot.advance([gpu_task("mine", project="ml", at_ms=9, strategy=strategy)])
    during = placed(snapshot, HOUR_MS)
    assert during.pop("mine") == "a", "what is reserved is used first"
    assert list(during.values()) == ["b"]
    assert len(placed(snapshot, 2 * HOUR_MS)) == 3


def test_room_beside_the_reserved_part_stays_open() -> None:
    snapshot = reserved(a_snapshot([a_node("a", cpu=8, gpus=4)]), a_reservation(gpus=2, cpu_milli=4000))
    snapshot.advance([gpu_task(f"t{i}", at_ms=i) for i in range(3)] + [a_task(f"c{i}", cpu=3000, at_ms=5 + i) for i in range(2)])
    assert sorted(placed(snapshot, 0)) == ["c0", "t0", "t1"]


def test_what_the_project_runs_already_counts_as_its_part() -> None:
    snapshot = reserved(a_snapshot([a_node("a", gpus=4)]), a_reservation(gpus=2))
    snapshot.advance([gpu_task("mine", 2, project="ml")])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([gpu_task("other", 2)])
    assert placed(snapshot, 1) == {"other": "a"}


def test_whoever_is_still_there_makes_room_when_the_project_comes() -> None:
    snapshot = a_snapshot([a_node("a", gpus=2)], [gpu_task("open", 2, priority=99)])
    commit(snapshot, schedule(snapshot, 0))
    reserved(snapshot, a_reservation(gpus=2))
    snapshot.advance([gpu_task("mine", 1, project="ml", priority=1)])
    assert schedule(snapshot, HOUR_MS - 1).preemptions == ()
    plan = schedule(snapshot, HOUR_MS)
    assert [(p.preemptor, p.reservation) for p in plan.preemptions] == [("mine", "r1")]
    snapshot.advance(apply(snapshot, Planned(plan, ()), HOUR_MS).puts)
    (stopping,) = snapshot.allocations.values()
    assert sentence(stopping.reason) == "It made room for mine, for whose project the node is reserved (r1)."


def test_it_ends_by_itself_or_when_it_is_cancelled() -> None:
    snapshot = reserved(a_snapshot([a_node(gpus=4)]), a_reservation("r1"), a_reservation("r2", from_ms=5 * HOUR_MS))
    assert not apply(snapshot, Tick(), 2 * HOUR_MS - 1)
    over = apply(snapshot, Tick(), 2 * HOUR_MS)
    assert over.removed == ((Reservation, "r1"),)
    assert [(event.subject, event.what) for event in over.events] == [("reservation", "expired")]
    gone = apply(snapshot, ReservationCancelled("r2", "ann"), 0)
    assert (gone.removed, gone.events[0].facts["by"]) == (((Reservation, "r2"),), "ann")
    assert not apply(snapshot, ReservationCancelled("nope", "ann"), 0)


def closed(snapshot: Snapshot, *names: str) -> Snapshot:
    snapshot.advance([replace(snapshot.nodes[name], cordoned=True) for name in names])
    return snapshot


def moved(snapshot: Snapshot, now_ms: int = 0) -> dict[str, dict[str, int]]:
    """Made true, and told as reservation to node to GPUs."""
    for one in moved_reservations(snapshot, now_ms):
        snapshot.advance(apply(snapshot, ReservationMoved(one), now_ms).puts)
    return {name: {part.node: part.gpus for part in one.parts} for name, one in snapshot.reservations.items()}


def test_a_part_on_a_node_that_is_drained_or_lost_moves_and_the_others_stay() -> None:
    snapshot = reserved(a_snapshot([a_node(name, gpus=2) for name in "abcd"]), a_reservation(gpus=4))
    assert moved(snapshot) == {"r1": {"a": 2, "b": 2}}
    assert moved(closed(snapshot, "a")) == {"r1": {"b": 2, "c": 2}}
    snapshot.advance([replace(snapshot.nodes["b"], status=NodeStatus.LOST)])
    assert moved(snapshot) == {"r1": {"c": 2, "d": 2}}
    assert moved_reservations(snapshot, 0) == ()


def test_what_finds_no_room_elsewhere_stays_and_moves_when_there_is_some() -> None:
    snapshot = reserved(
        a_snapshot([a_node("a", gpus=2), a_node("b", gpus=2)]), a_reservation(gpus=2), a_reservation("r2", gpus=2)
    )
    assert moved(closed(snapshot, "a")) == {"r1": {"a": 2}, "r2": {"b": 2}}
    snapshot.advance([a_node("c", gpus=1)])
    assert moved(snapshot) == {"r1": {"a": 2}, "r2": {"b": 2}}, "a part moves whole"
    snapshot.advance([a_node("d", gpus=1)])
    assert moved(snapshot) == {"r1": {"c": 1, "d": 1}, "r2": {"b": 2}}


def test_two_that_move_at_once_do_not_take_the_same_room() -> None:
    both = (a_reservation(gpus=2), a_reservation("r2", gpus=2))
    snapshot = reserved(a_snapshot([a_node("a", gpus=4)]), *both)
    snapshot.advance([a_node("b", gpus=2), a_node("c", gpus=2)])
    assert moved(closed(snapshot, "a")) == {"r1": {"b": 2}, "r2": {"c": 2}}


def test_a_part_that_moves_beside_another_is_one_part_with_it() -> None:
    snapshot = reserved(a_snapshot([a_node("a", gpus=1), a_node("b", gpus=1)]), a_reservation(gpus=2, cpu_milli=4000))
    snapshot.advance([a_node("b", gpus=2)])
    moved(closed(snapshot, "a"))
    assert snapshot.reservations["r1"].parts == (ReservedPart("b", 2, 4000),)


def test_a_move_is_told_and_one_that_is_over_stays() -> None:
    snapshot = reserved(a_snapshot([a_node("a", gpus=2), a_node("b", gpus=2)]), a_reservation())
    (there,) = moved_reservations(closed(snapshot, "a"), 5)
    (event,) = apply(snapshot, ReservationMoved(there), 5).events
    assert (event.what, event.facts) == ("moved", {"project": "ml", "left": "a", "nodes": "b"})
    assert moved_reservations(snapshot, 2 * HOUR_MS) == ()
    gone = replace(there, name="never made")
    assert apply(snapshot, ReservationMoved(gone), 5).puts == ()


def test_slices_are_reserved_by_their_profile_and_are_no_cards() -> None:
    nodes = [a_node("card", gpus=1), sliced()]
    for types in ((), ("a100",)):
        reason = find_parts(a_snapshot(nodes), a_reservation(gpus=2, gpu_types=types))
        assert isinstance(reason, Reason)
        assert (reason.code, reason.facts["largest"]) == (ReasonCode.CANNOT_RESERVE, 1000)
    assert find_parts(a_snapshot(nodes), a_reservation(gpus=2, gpu_types=("1g.5gb",))) == (ReservedPart("mig", 2),)
    snapshot = reserved(a_snapshot(nodes), a_reservation(gpus=6, gpu_types=("1g.5gb",), from_ms=1))
    snapshot.advance([gpu_task(f"t{i}", gpu_types=("1g.5gb",), at_ms=i) for i in range(2)])
    assert placed(snapshot, 1) == {"t0": "mig"}, "one slice is not reserved"
