"""What the demo decides and shows, and how it ends what it has started."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from crater_agent.config import load as load_agent_config
from crater_core.service.config import load_config
from crater_core.wire.base import ReasonView
from crater_core.wire.resources import AmountsView, GrantView
from crater_core.wire.tasks import TaskView
from example_pipelines.demo.cluster import Demo, Ports, write_files
from example_pipelines.demo.loop import Happened
from example_pipelines.demo.machine import Machine, free_ports, share_of_cores, share_of_memory_gb
from example_pipelines.demo.processes import DemoFailed, Processes, leftovers, stop_leftovers, tail
from example_pipelines.demo.show import Screen, outcome, row, seconds, totals


def a_task(**more: object) -> TaskView:
    fields: dict[str, object] = {
        "id": "t1",
        "name": "trained_model",
        "type": "training",
        "status": "succeeded",
        "project": "vision",
        "user": "demo",
        "priority": 50,
        "requested": AmountsView(cpu_milli=750, gpu_milli=500),
        "node": "gpu-node-01",
        "devices": [GrantView(uuid="GPU-1", index=0, compute_milli=500, memory_mib=1, sharing="time_slice", simulated=True)],
        "submitted_at_ms": 1,
        "started_at_ms": 2,
        "waited_ms": 1_250,
        "ran_ms": 61_000,
        "gpu_hours": 0.5,
        "core_hours": 0.25,
    }
    return TaskView.model_validate({**fields, **more})


def test_a_row_says_where_on_what_how_long_and_how_it_ended():
    assert row(a_task()) == (
        "trained_model",
        "gpu-node-01",
        "0.5 simulated GPU, 0.75 cores",
        "1.25 s",
        "1 min 1 s",
        "0.50000",
        "0.25000",
        "succeeded",
    )


def test_a_task_that_did_not_succeed_says_why():
    reason = ReasonView(code="oom_killed", message="It used more than 1 GiB of memory.")
    assert outcome(a_task(status="failed", reason=reason)) == "failed: It used more than 1 GiB of memory."


def test_a_replica_that_answers_is_running_and_ready():
    assert outcome(a_task(status="running", ready=True)) == "running, ready"


def test_the_last_row_adds_up():
    assert totals([a_task(), a_task()]) == ("1.00000", "0.50000")


def test_times_are_read_at_a_glance():
    assert [seconds(ms) for ms in (0, 40, 59_999, 60_000)] == ["0.00 s", "0.04 s", "60.00 s", "1 min 0 s"]


def test_plain_output_has_no_control_characters():
    output = io.StringIO()
    screen = Screen(Console(file=output, width=130, highlight=False))
    screen.busy("moving")
    screen.event(Happened("ExecutionStepStartEvent", "features", ""))
    screen.event(Happened("LogMessageEvent", "trained_model", "epoch  1/8"))
    screen.event(Happened("EngineEvent", None, "Run worker is task t01m8rxgfhsawd7kvxx on node cpu-node-01."))
    screen.event(Happened("EngineEvent", None, "something that nobody needs to see"))
    screen.table([a_task()])
    text = output.getvalue()
    assert "\x1b" not in text
    assert "features             started" in text
    assert "epoch  1/8" in text
    assert "nobody" not in text
    assert "Run worker is task" in text
    assert "gpu-node-01" in text


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_two_nodes_share_the_machine_without_taking_more_than_it_has(cores: int):
    assert cores == 1 or 2 * share_of_cores(cores) <= cores
    assert 2 * share_of_memory_gb(4.1) < 4.1


@pytest.mark.parametrize("real_gpus", [0, 1])
def test_the_files_are_right_and_the_token_stands_in_one_of_them(tmp_path: Path, real_gpus: int):
    demo = Demo(tmp_path / "home", Ports(*free_ports(5)), Machine(2, 16.0, real_gpus), "crater_secret")
    write_files(demo)
    config = load_config(demo.home / "scheduler.yaml")
    assert config.tokens[0].role == "admin"
    for node in ("gpu-node-01", "cpu-node-01"):
        assert load_agent_config(demo.home / f"{node}.yaml").node_name == node
    gpu = yaml.safe_load((demo.home / "gpu-node-01.yaml").read_text())
    assert ("simulated_gpus" in gpu) == (real_gpus == 0)
    holds_it = [path.name for path in demo.home.rglob("*") if path.is_file() and "crater_secret" in path.read_text()]
    assert holds_it == ["token"]
    assert demo.home.stat().st_mode & 0o077 == 0


def test_a_process_that_ends_early_is_told_with_its_last_words(tmp_path: Path):
    processes = Processes(tmp_path, {})
    processes.start("broken", [sys.executable, "-c", "print('no such file: x'); raise SystemExit(3)"])
    with pytest.raises(DemoFailed, match=r"(?s)broken ended with exit code 3.*no such file: x"):
        processes.wait_until("it", lambda: False, 30)
    assert processes.stop_all() == []


def test_stopping_ends_children_and_what_ignores_the_signal(tmp_path: Path):
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen(['/bin/sleep', '600']); print('up', flush=True); time.sleep(600)"
    )
    processes = Processes(tmp_path, {"CRATER_DEMO_HOME": str(tmp_path)})
    stubborn = processes.start("stubborn", [sys.executable, "-c", code], grace_s=0.2)
    processes.wait_until("it", lambda: "up" in tail(stubborn.log), 30)
    assert len(leftovers(tmp_path)) == 2
    assert processes.stop_all() == ["stubborn"]
    assert leftovers(tmp_path) == {}


def test_what_an_earlier_demo_left_is_found_by_its_home_and_nothing_else_is(tmp_path: Path):
    environment = {"CRATER_DEMO_HOME": str(tmp_path / "a")}
    mine = subprocess.Popen(["/bin/sleep", "600"], env=environment, start_new_session=True)
    other = subprocess.Popen(["/bin/sleep", "600"], env={"CRATER_DEMO_HOME": str(tmp_path / "ab")}, start_new_session=True)
    try:
        until = time.monotonic() + 10
        while mine.pid not in leftovers(tmp_path / "a") and time.monotonic() < until:
            time.sleep(0.01)
        assert set(stop_leftovers(tmp_path / "a")) == {mine.pid}
        assert mine.wait(10) == -signal.SIGTERM
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
