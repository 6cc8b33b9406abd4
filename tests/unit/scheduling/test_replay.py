"""A decision taken elsewhere as a file: the same plan, and nothing in it that is a secret."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_node, a_snapshot, a_task, commit

from crater_core.cli.app import run
from crater_core.errors import InvalidRequest
from crater_core.model.node import Drain
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.reservation import Reservation, ReservedPart
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import HealthCheck, Mount
from crater_core.scheduling import learn_workload, schedule
from crater_core.scheduling.prices import price_table
from crater_core.store.snapshot_file import read_snapshot, write_snapshot

SECRET = "hunter2"


def secretive(**more: Any) -> Any:
    """What tasks may carry that is nobody else's to read."""
    hidden: dict[str, Any] = {
        "command": ("train", f"--key={SECRET}"),
        "env": {SECRET: SECRET},
        "env_profile": SECRET,
        "working_dir": f"/{SECRET}",
        "mounts": (Mount(f"/{SECRET}", "/data"),),
        "output_path": f"/{SECRET}",
        "labels": {SECRET: SECRET},
        "health": HealthCheck(f"/{SECRET}"),
        "warm_preload": (SECRET,),
    }
    task = a_task(**more)
    return replace(task, spec=replace(task.spec, **hidden))


def a_busy_cluster() -> Snapshot:
    """Something of everything that decisions read."""
    nodes = [
        replace(
            a_node(name, gpus=2, runtimes=("process", "docker")),
            agent_url=f"http://{SECRET}",
            address=SECRET,
            notes=(SECRET,),
            boot_id=SECRET,
        )
        for name in ("a", "b", "c")
    ]
    nodes.append(replace(a_node("d", gpus=2), cordoned=True, drain=Drain("ann", SECRET)))
    settings = Settings(strategy="fragmentation_aware", short_first_milli=500, preempt_min_run_ms=0)
    snapshot = a_snapshot(nodes, [secretive(id=f"r{i}", gpu=1000, image=f"{SECRET}/i") for i in range(5)], settings=settings)
    commit(snapshot, schedule(snapshot, 0))
    said = Reason(ReasonCode.EXIT_CODE, {"exit_code": 1, "detail": SECRET})
    waiting = [
        secretive(id="urgent", gpu=2000, strategy="preemptive", priority=90, at_ms=1),
        secretive(id="poor", project="ads", cpu=4000, at_ms=2),
        secretive(id="barred", gpu=1000, project="nlp", at_ms=3),
        replace(secretive(id="again", at_ms=4, not_before_ms=5000), reason=said, fault=said),
    ]
    snapshot.advance([QuotaPolicy("ads-quota", ("ads",), Limits(cpu_milli=1000)), *waiting])
    snapshot.advance([Reservation("exam", "vision", 0, 9000, 1, parts=(ReservedPart("c", 1),), why=SECRET)])
    snapshot.prices = price_table(nodes, learn_workload(task.spec for task in snapshot.tasks.values()))
    return snapshot


def test_a_snapshot_from_a_file_gives_the_same_plan() -> None:
    snapshot = a_busy_cluster()
    again, at_ms = read_snapshot(write_snapshot(snapshot, 100))
    plan, before = schedule(again, at_ms), schedule(snapshot, 100)
    assert at_ms == 100
    assert again.prices == snapshot.prices
    assert (plan.placements, plan.preemptions) == (before.placements, before.preemptions)
    assert before.preemptions
    waiting = {task: reason.code for task, reason in before.waiting.items()}
    assert {task: reason.code for task, reason in plan.waiting.items()} == waiting
    assert set(waiting) == {"urgent", "poor", "barred", "again"}


def test_no_secret_is_in_the_file() -> None:
    text = gzip.decompress(write_snapshot(a_busy_cluster(), 100)).decode()
    assert SECRET not in text
    assert "urgent" in text


@pytest.mark.parametrize("data", [b"", b"not compressed", gzip.compress(b"[]", mtime=0), gzip.compress(b'{"form": 2}', mtime=0)])
def test_another_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="that-file"):
        read_snapshot(data, "that-file")


def test_half_a_file_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no whole file"):
        read_snapshot(write_snapshot(a_busy_cluster(), 100)[:-20])


def test_the_command_prints_the_plan_and_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.snapshot"
    file.write_bytes(write_snapshot(a_busy_cluster(), 100))
    assert run(["debug", "replay", str(file), "--json", "--task", "barred"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["waiting"]["urgent"]["code"] == "waiting_for_preemption"
    assert {one["for"] for one in told["preemptions"]} == {"urgent"}
    assert len(told["explanation"]["candidates"]) == 4
    assert run(["debug", "replay", str(file), "--after", "10s"]) == 0
    shown = capsys.readouterr().out
    assert "is stopped for urgent" in shown
    assert "again" in shown
    assert run(["debug", "replay", str(tmp_path / "none")]) != 0
