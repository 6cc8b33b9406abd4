"""Agents that crash and come back: workloads go on, ends are told once, nothing runs twice, nothing foreign is touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_harness import AgentProcess, SchedulerStandIn, poll_until


def _spawner_pid(agent: AgentProcess) -> int:
    mark = os.fsencode(agent.data_dir)
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"shim.py" in command and mark in command:
            return int(pid)
    return 0


def _until_file(path: Path) -> None:
    poll_until(path.exists, what=str(path))


def test_a_workload_outlives_its_agent_and_its_exit_code_is_kept(start, place: Path, scheduler: SchedulerStandIn):
    agent = start()
    scheduler.give("a", ["sh", "-c", f"until [ -e {place}/go ]; do sleep 0.02; done; touch {place}/gone; exit 5"])
    scheduler.running("a")
    agent.kill()
    (place / "go").touch()
    _until_file(place / "gone")
    agent.restart()
    end = scheduler.final("a")
    assert (end.status.value, end.exit_code) == ("failed", 5)
    assert len([report for report in scheduler.reports_of("a") if report.status.ended]) == 1


def test_a_workload_that_still_runs_is_taken_over_and_can_be_stopped(start, scheduler: SchedulerStandIn):
    agent = start()
    scheduler.give("a", ["sh", "-c", "echo $$; exec sleep 600"])
    pid = int(poll_until(lambda: scheduler.running("a") and scheduler.read_log_text("a")))
    agent.kill()
    heard = len(scheduler.reports)
    agent.restart()
    poll_until(lambda: len(scheduler.reports) > heard, what="a report of the new agent")
    assert scheduler.reports[-1].status.value == "running"
    assert Path(f"/proc/{pid}").exists()
    scheduler.change("a", stop=True)
    assert scheduler.final("a").exit_code == 128 + signal.SIGTERM


def test_when_the_spawner_died_too_the_workload_goes_on_and_its_exit_is_unknown(start, place: Path, scheduler: SchedulerStandIn):
    agent = start()
    scheduler.give("a", ["sh", "-c", f"until [ -e {place}/go ]; do sleep 0.02; done; touch {place}/gone"])
    scheduler.running("a")
    agent.kill()
    os.kill(_spawner_pid(agent), signal.SIGKILL)
    agent.restart()
    poll_until(lambda: "took over a: running" in agent.log, what="the take-over")
    (place / "go").touch()
    _until_file(place / "gone")
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value, end.exit_code) == ("failed", "exit_unknown", None)


def test_a_spawner_that_dies_under_the_agent_is_replaced(start, scheduler: SchedulerStandIn):
    agent = start()
    scheduler.give("old", ["sleep", "600"])
    scheduler.running("old")
    os.kill(_spawner_pid(agent), signal.SIGKILL)
    poll_until(lambda: "the spawner is gone" in agent.log, what="the loss noticed")
    scheduler.give("new", ["true"])
    assert scheduler.final("new").status == "succeeded"
    scheduler.change("old", stop=True)
    assert scheduler.final("old").status == "cancelled"


def test_an_end_that_was_never_reported_is_reported_by_the_next_agent(start, scheduler: SchedulerStandIn):
    agent = start()
    scheduler.give("a", ["sleep", "0.5"])
    scheduler.running("a")
    scheduler.stop()
    poll_until(lambda: "a ended" in agent.log, what="the end")
    agent.kill()
    scheduler.start()
    agent.restart()
    assert scheduler.final("a").status == "succeeded"


def test_what_was_reported_is_not_started_again_after_a_restart(start, place: Path, scheduler: SchedulerStandIn):
    agent = start()
    lease = scheduler.give("a", ["sh", "-c", f"echo x >> {place}/ran"])
    scheduler.final("a")
    # A scheduler that lost its last write hands the same lease out again.
    agent.kill()
    scheduler._put(lease)
    agent.restart()
    poll_until(lambda: len([report for report in scheduler.reports_of("a") if report.status.ended]) == 2, what="the end again")
    assert (place / "ran").read_text() == "x\n"


def test_a_foreign_process_with_a_reused_pid_is_never_touched(start, scheduler: SchedulerStandIn):
    agent = start()
    scheduler.give("a", ["sleep", "600"], grace_ms=100)
    scheduler.running("a")
    agent.kill()
    spawner = _spawner_pid(agent)
    os.kill(spawner, signal.SIGKILL)
    started = agent.data_dir / "allocations" / "a" / "started.json"
    foreign = subprocess.Popen(["sleep", "601"], start_new_session=True)
    try:
        record = json.loads(started.read_text())
        os.kill(record["pid"], signal.SIGKILL)
        # As if the kernel had given the old pid to somebody else: pid matches, start time does not.
        started.write_text(json.dumps({**record, "pid": foreign.pid}))
        agent.restart()
        scheduler.change("a", stop=True)
        assert scheduler.final("a").status.value in ("failed", "cancelled")
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_what_carries_the_mark_and_belongs_to_nobody_is_ended(start, place: Path, scheduler: SchedulerStandIn):
    agent = start()
    assert scheduler.declaration
    agent.kill()
    scratch = agent.data_dir / "scratch" / "left"
    scratch.mkdir()
    stray = subprocess.Popen(["sleep", "600"], env={"CRATER_SCRATCH_DIR": str(scratch)}, start_new_session=True)
    other = subprocess.Popen(["sleep", "601"], env={"CRATER_SCRATCH_DIR": f"{place}/other/scratch/x"}, start_new_session=True)
    try:
        agent.restart()
        assert stray.wait(10) == -signal.SIGKILL
        poll_until(lambda: not scratch.exists(), what="the scratch directory gone")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_agent_and_not_its_workloads(start, scheduler: SchedulerStandIn, number: signal.Signals):
    agent = start()
    scheduler.give("a", ["sh", "-c", "echo $$; exec sleep 600"])
    pid = int(poll_until(lambda: scheduler.running("a") and scheduler.read_log_text("a")))
    agent.process.send_signal(number)
    assert agent.process.wait(10) == 0
    assert Path(f"/proc/{pid}").exists()
    assert "1 workload(s) go on without it" in agent.log


def test_with_stop_workloads_on_exit_nothing_is_left(start, scheduler: SchedulerStandIn):
    agent = start(arguments=("--stop-workloads-on-exit",))
    scheduler.give("a", ["sh", "-c", "trap 'echo bye; exit' TERM; echo $$; while :; do sleep 0.05; done"])
    scheduler.give("stubborn", ["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done"], grace_ms=300)
    pids = [
        int(poll_until(lambda name=name: scheduler.running(name) and scheduler.read_log_text(name))) for name in ("a", "stubborn")
    ]
    spawner = _spawner_pid(agent)
    assert agent.terminate() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    poll_until(lambda: not Path(f"/proc/{spawner}").exists(), what="the spawner gone")
    assert (agent.data_dir / "logs" / "a" / "stdout").read_text().endswith("bye\n")


def test_without_workloads_the_spawner_ends_with_its_agent(start, scheduler: SchedulerStandIn):
    agent = start()
    assert scheduler.declaration
    spawner = _spawner_pid(agent)
    agent.terminate()
    poll_until(lambda: not Path(f"/proc/{spawner}").exists(), 30, "the spawner gone")


def test_a_second_agent_with_the_same_data_is_refused(start, scheduler: SchedulerStandIn):
    agent = start()
    assert scheduler.declaration
    second = subprocess.run(agent.command, capture_output=True, text=True, timeout=20)
    assert (second.returncode, "another agent already uses" in second.stderr) == (1, True)


def test_fifty_rounds_leave_nothing_behind(start, scheduler: SchedulerStandIn):
    agent = start()
    commands = [
        ["true"],
        ["sh", "-c", "sleep 60 & setsid sleep 60 & exit 0"],
        ["no-such"],
        [sys.executable, "-c", "open('f', 'w')"],
    ]
    for number in range(50):
        scheduler.give(f"r{number}", commands[number % 4])
    for number in range(50):
        scheduler.final(f"r{number}")
    poll_until(lambda: not list((agent.data_dir / "allocations").iterdir()), what="no allocation left on disk")
    poll_until(lambda: not list((agent.data_dir / "scratch").iterdir()), what="no scratch directory left")
    agent.terminate()
    assert agent.groups() == []
    mark = f"CRATER_SCRATCH_DIR={agent.data_dir}".encode()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in _environ(pid)]  # noqa: PTH208


def _environ(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
