"""Drained nodes and devices in quarantine, seen by every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import a_node, a_snapshot, a_task

from crater_core.model.node import Drain, SharingMode
from crater_core.model.reason import Reason, ReasonCode
from crater_core.scheduling import STRATEGIES, explain, schedule


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("gpu", [1000, 250])
def test_a_device_in_quarantine_is_never_chosen(strategy: str, gpu: int) -> None:
    nodes = [a_node(name, gpus=2, unwell=[0], sharing=SharingMode.TIME_SLICE) for name in ("a", "b")]
    tasks = [a_task(f"t{i}", gpu=gpu, cpu=0, memory_gib=0, strategy=strategy, at_ms=i) for i in range(9)]
    snapshot = a_snapshot(nodes, tasks)
    plan = schedule(snapshot, 0)
    assert {grant.uuid for placement in plan.placements for grant in placement.grants} == {"GPU-a-1", "GPU-b-1"}
    assert len(plan.placements) == 2 * 1000 // gpu
    snapshot.advance([a_node("a", gpus=2, unwell=[0, 1]), a_node("b", gpus=2, unwell=[0, 1])])
    rejections = {candidate.node: candidate.rejection for candidate in explain(snapshot, "t8", 0).candidates}
    assert rejections == dict.fromkeys(("a", "b"), Reason.of(ReasonCode.GPU_UNHEALTHY, count=2, why=""))


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_a_draining_node_takes_nothing_and_says_why(strategy: str) -> None:
    draining = replace(a_node("a"), cordoned=True, drain=Drain("ann", "new driver"))
    snapshot = a_snapshot([draining, a_node("b", cpu=1)], [a_task("t1", strategy=strategy), a_task("t2", strategy=strategy)])
    assert [placement.node for placement in schedule(snapshot, 0).placements] == ["b"]
    rejection = explain(snapshot, "t2", 0).candidates[0].rejection
    assert rejection == Reason.of(ReasonCode.DRAINING, why=" (new driver)")
