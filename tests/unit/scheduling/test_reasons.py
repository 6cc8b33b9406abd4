"""Why a task waits, with the numbers, and what `explain` says of each node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import a_node, a_snapshot, a_spec, a_task, commit

from crater_core.errors import NotFound
from crater_core.model.node import Node, NodeStatus, SharingMode
from crater_core.model.reason import Reason, ReasonCode, sentence
from crater_core.model.resources import Amounts
from crater_core.model.units import GIB
from crater_core.scheduling import explain, explain_spec, schedule


def reason_of(nodes: list[Node], *, running: list[Any] = (), **task: Any) -> Reason:  # type: ignore[assignment]
    snapshot = a_snapshot(nodes, running)
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("waits", at_ms=9, **task)])
    return schedule(snapshot, 9).waiting["waits"]


def test_without_nodes_it_says_that_none_is_ready() -> None:
    assert reason_of([], cpu=1) == Reason.of(ReasonCode.NO_NODE_READY, nodes=0)


def test_room_that_is_free_in_pieces_is_fragmented() -> None:
    reason = reason_of([a_node("a", cpu=2), a_node("b", cpu=2)], running=[a_task("r1"), a_task("r2", cpu=1500)], cpu=2000)
    assert reason.code is ReasonCode.NO_ROOM
    reason = reason_of([a_node("a", cpu=2), a_node("b", cpu=2)], running=[a_task("r1", cpu=500)], cpu=2500)
    assert reason.facts == {"resource": "cpu", "wanted": 2500, "free": 3500, "best": 2000, "place": "node"}
    assert sentence(reason) == "3.5 cores are free in all, but no single node has the 2.5 asked for (most on one: 2)."


def test_a_busy_cluster_has_no_room() -> None:
    reason = reason_of([a_node(memory_gib=4)], running=[a_task("r1", memory_gib=3)], memory_gib=2)
    assert reason == Reason.of(ReasonCode.NO_ROOM, resource="memory", wanted=2 * GIB, free=GIB)


def test_free_gpus_on_nodes_without_free_cores_are_told_as_missing_cores() -> None:
    nodes = [a_node("a", cpu=1, gpus=2), a_node("b", cpu=8)]
    reason = reason_of(nodes, running=[a_task("r1", cpu=1000, gpu=1000)], gpu=1000, cpu=1000)
    assert (reason.code, reason.facts["resource"]) == (ReasonCode.NO_ROOM, "cpu")


def test_half_used_devices_are_fragmented_for_a_whole_one() -> None:
    shares = [a_task(f"r{i}", gpu=500, gpu_count=2) for i in range(1)]
    reason = reason_of([a_node(gpus=2, sharing=SharingMode.TIME_SLICE)], running=shares, gpu=1000)
    assert reason.facts == {"resource": "gpu", "wanted": 1000, "free": 1000, "best": 0, "place": "node"}


def test_small_rests_are_fragmented_for_a_share() -> None:
    running = [a_task("r1", gpu=700, gpu_count=2)]
    reason = reason_of([a_node(gpus=2, sharing=SharingMode.TIME_SLICE)], running=running, gpu=400)
    assert sentence(reason) == "0.6 GPU are free in all, but no single device has the 0.4 asked for (most on one: 0.3)."


def test_gpu_memory_is_named_when_it_is_what_lacks() -> None:
    running = [a_task("r1", gpu=100, gpu_memory_mib=30_000)]
    reason = reason_of([a_node(gpus=1, sharing=SharingMode.MPS)], running=running, gpu=100, gpu_memory_mib=20_000)
    assert reason == Reason.of(ReasonCode.NO_ROOM, resource="gpu_memory", wanted=20_000, free=10_960)


def test_explain_gives_every_node_its_score_or_first_rejection() -> None:
    nodes = [
        a_node("a-cordoned", cordoned=True),
        a_node("b-lost", status=NodeStatus.LOST, heartbeat_at_ms=1000),
        a_node("c-labels", labels={"zone": "x"}),
        a_node("d-no-gpu", labels={"zone": "z"}),
        a_node("e-short", labels={"zone": "z"}, gpus=1),
        a_node("f-cores", labels={"zone": "z"}, gpus=2, cpu=1),
        a_node("g-fits", labels={"zone": "z"}, gpus=2),
        a_node("h-unwell", labels={"zone": "z"}, gpus=2, unwell=[1]),
    ]
    snapshot = a_snapshot(nodes, [a_task(gpu=2000, cpu=2000, node_labels={"zone": "z"})])
    told = explain(snapshot, "t1", 4000)
    assert [(c.node, c.rejection.code if c.rejection else None) for c in told.candidates] == [
        ("a-cordoned", ReasonCode.CORDONED),
        ("b-lost", ReasonCode.NODE_LOST),
        ("c-labels", ReasonCode.LABELS_MISMATCH),
        ("d-no-gpu", ReasonCode.GPU_TYPE_MISSING),
        ("e-short", ReasonCode.GPU_SHORT),
        ("f-cores", ReasonCode.CPU_SHORT),
        ("g-fits", None),
        ("h-unwell", ReasonCode.GPU_UNHEALTHY),
    ]
    assert told.candidates[6].score is not None
    assert (told.strategy, told.position) == ("best_fit", 1)


def test_explain_says_each_kind_of_shortage_of_a_node() -> None:
    node = replace(a_node(gpus=1, sharing=SharingMode.MPS, port_count=1), allocatable=Amounts(2000, 4 * GIB, 4 * GIB))
    snapshot = a_snapshot([node], [a_task("r", cpu=1000, memory_gib=2, disk_gib=2, gpu=100, gpu_memory_mib=30_000, ports=1)])
    commit(snapshot, schedule(snapshot, 0))

    def rejection(**spec: Any) -> ReasonCode | None:
        found = explain_spec(snapshot, a_spec(**spec), 0).candidates[0].rejection
        return found.code if found else None

    assert rejection(cpu=2000) is ReasonCode.CPU_SHORT
    assert rejection(memory_gib=3) is ReasonCode.MEMORY_SHORT
    assert rejection(disk_gib=3) is ReasonCode.DISK_SHORT
    assert rejection(ports=1) is ReasonCode.PORTS_SHORT
    assert rejection(gpu=950) is ReasonCode.GPU_SHORT
    assert rejection(gpu=100, gpu_memory_mib=20_000) is ReasonCode.GPU_MEMORY_SHORT
    assert rejection(gpu=100, gpu_memory_mib=10, user="bob") is ReasonCode.MPS_USER
    assert rejection(type="control") is None


def test_a_dry_run_says_what_would_happen_and_changes_nothing() -> None:
    snapshot = a_snapshot([a_node(gpus=1)])
    assert explain_spec(snapshot, a_spec(gpu=1000), 0).reason is None
    refused = explain_spec(snapshot, a_spec(gpu=2000), 0).reason
    assert refused is not None
    assert refused.code is ReasonCode.LARGER_THAN_ANY_NODE
    assert snapshot.tasks == {}


def test_explaining_an_unknown_task_is_not_found() -> None:
    with pytest.raises(NotFound):
        explain(a_snapshot(), "nope", 0)
