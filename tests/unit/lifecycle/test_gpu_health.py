"""A GPU that fails under a task, and what the history of its node says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from world import World, a_node, a_spec

from crater_core.lifecycle.inputs import NodeRegistered, Report
from crater_core.model.allocation import AllocationStatus as A
from crater_core.model.allocation import Use
from crater_core.model.node import Node
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.task import RetryPolicy, TaskStatus

FAULT = Reason.of(ReasonCode.GPU_FAULT, device="0", node="n1", why="it is lost")


def _with_gpu(node: Node, **fields: object) -> Node:
    return replace(node, devices=(replace(node.devices[0], **fields), *node.devices[1:]))  # type: ignore[arg-type]


@pytest.mark.parametrize(("again", "status"), [(True, TaskStatus.QUEUED), (False, TaskStatus.FAILED)])
def test_a_task_whose_card_failed_runs_again_as_after_a_lost_node(again: bool, status: TaskStatus):
    world = World(a_node(gpus=1))
    task = world.submit(a_spec(retry=RetryPolicy(on_node_loss=again)))
    world.report(world.run(task), A.LOST, FAULT)
    assert (world.task(task).status, world.task(task).reason) == (status, FAULT)


def test_the_nodes_history_says_when_a_device_was_set_aside_and_when_it_came_back():
    node = a_node(gpus=2)
    world = World(node)
    world.do(NodeRegistered(_with_gpu(node, healthy=False, unwell="it is lost")))
    world.do(NodeRegistered(_with_gpu(node, healthy=False, unwell="it is lost, still")))
    world.do(NodeRegistered(node))
    told = [(event.what, dict(event.facts)) for event in world.events if event.what.startswith("gpu_")]
    uuid = node.devices[0].uuid
    assert told == [
        ("gpu_quarantined", {"gpu": 0, "uuid": uuid, "why": "it is lost"}),
        ("gpu_released", {"gpu": 0, "uuid": uuid}),
    ]


def test_a_usage_record_has_the_use_of_gpus():
    world = World(a_node(gpus=1))
    task = world.submit(a_spec())
    allocation = world.run(task)
    token, use = world.snapshot.allocations[allocation].token, Use(gpu_busy_ms=700, gpu_memory_peak_mib=900)
    world.do(Report("n1", allocation, token, A.SUCCEEDED, world.now_ms, use=use))
    (record,) = world.usage
    assert (record.used_gpu_ms, record.gpu_memory_peak_mib) == (700, 900)
