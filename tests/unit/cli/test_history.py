"""What `crater history export` writes is read again by `crater simulate`."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from builders import a_node, a_task

from crater_core.cli.history import machine_of, row_of
from crater_core.model.node import SharingMode
from crater_core.model.resources import NOTHING, GpuRequest
from crater_core.model.task import TaskStatus
from crater_core.simulation.loaders import read_nodes, read_trace
from crater_core.wire.nodes import node_view
from crater_core.wire.tasks import task_view


def _csv(path: Path, row: dict[str, Any]) -> Path:
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


def _replayed(tmp_path: Path, **asked: Any) -> GpuRequest | None:
    task = replace(a_task(**asked), status=TaskStatus.SUCCEEDED, started_at_ms=1, ended_at_ms=2)
    nodes = _csv(tmp_path / "nodes.csv", machine_of(node_view(a_node(gpus=2), NOTHING, {})))
    trace = read_trace(_csv(tmp_path / "tasks.csv", row_of(task_view(task, now_ms=3))), nodes)
    return trace.arrivals[0].spec.request.gpu


def test_cards_and_shares_are_replayed_as_they_were_asked_for(tmp_path: Path):
    assert _replayed(tmp_path, gpu=2000, gpu_types=("a100", "h100")) == GpuRequest(2, types=("a100", "h100"))
    assert _replayed(tmp_path, gpu=250, gpu_memory_mib=9_000) == GpuRequest(1, 250, 9_000, exclusive=False)


def test_a_slice_is_replayed_as_so_much_of_a_card(tmp_path: Path):
    assert _replayed(tmp_path, gpu=1000, gpu_types=("3g.20gb",)) == GpuRequest(1, 428, exclusive=False)
    assert _replayed(tmp_path, gpu=1000, gpu_types=("a100", "3g.20gb")) == GpuRequest(1, 428, exclusive=False, types=("a100",))


def test_slices_of_a_card_are_one_machine_with_one_card(tmp_path: Path):
    sliced = a_node(gpus=7, gpu_type="nvidia-a100", sharing=SharingMode.MIG, gpu_memory_mib=4_864, card_milli=142)
    (node,) = read_nodes(_csv(tmp_path / "nodes.csv", machine_of(node_view(sliced, NOTHING, {}))))
    assert [(device.model, device.memory_mib) for device in node.devices] == [("nvidia-a100", 7 * 4_864)]
