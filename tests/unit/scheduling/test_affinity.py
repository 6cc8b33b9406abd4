"""Near the data, near what the caller likes, and devices near each other."""

from __future__ import annotations

from dataclasses import replace

from builders import a_node, a_snapshot, a_task

from crater_core.model.node import Node
from crater_core.scheduling import schedule


def place(nodes: list[Node], **task: object) -> str:
    plan = schedule(a_snapshot(nodes, [a_task(strategy="affinity", **task)]), 0)
    return plan.placements[0].node


def test_the_node_with_most_of_the_data_comes_first() -> None:
    nodes = [a_node("a", cpu=64), a_node("b"), a_node("c")]
    assert place(nodes, data_bytes={"b": 10**9, "c": 9 * 10**9}) == "c"


def test_data_that_cannot_be_reached_excludes_nothing() -> None:
    assert place([a_node("a"), a_node("b", cordoned=True)], data_bytes={"b": 1, "gone": 5}) == "a"


def test_preferred_labels_decide_between_equals_and_exclude_nothing() -> None:
    nodes = [a_node("a", cpu=64), a_node("b", labels={"disk": "nvme"})]
    assert place(nodes, prefer_labels={"disk": "nvme", "zone": "z"}) == "b"
    assert place(nodes[:1], prefer_labels={"disk": "nvme"}) == "a"


def test_data_count_more_than_labels_and_labels_more_than_load() -> None:
    nodes = [a_node("a", labels={"disk": "nvme"}), a_node("b"), a_node("c", cpu=64)]
    assert place(nodes, prefer_labels={"disk": "nvme"}, data_bytes={"b": 1}) == "b"
    assert place(nodes, prefer_labels={"disk": "nvme"}) == "a"
    assert place(nodes) == "c"


def test_other_strategies_do_not_look_at_data() -> None:
    plan = schedule(a_snapshot([a_node("a"), a_node("b")], [a_task(data_bytes={"b": 1})]), 0)
    assert plan.placements[0].node == "a"


def joined(pairs: list[tuple[int, int]], numa: list[int | None]) -> Node:
    node = a_node(gpus=len(numa))
    links = {i: tuple(f"GPU-n1-{b if a == i else a}" for a, b in pairs if i in (a, b)) for i in range(len(numa))}
    return replace(node, devices=tuple(replace(d, links=links[d.index], numa_node=numa[d.index]) for d in node.devices))


def chosen(node: Node, count: int) -> list[int]:
    plan = schedule(a_snapshot([node], [a_task(gpu=1000 * count)]), 0)
    return [grant.index for grant in plan.placements[0].grants]


def test_several_whole_devices_are_joined_by_nvlink_where_they_can_be() -> None:
    assert chosen(joined([(1, 3)], [None] * 4), 2) == [1, 3]


def test_without_nvlink_they_are_on_one_numa_node() -> None:
    assert chosen(joined([], [0, 1, 0, 1]), 2) == [0, 2]


def test_nvlink_counts_more_than_numa() -> None:
    assert chosen(joined([(0, 3)], [0, 0, 1, 1]), 2) == [0, 3]
