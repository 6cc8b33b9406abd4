"""Programs that try to break their limits, and what becomes of them: enforced by cgroup where there is one, else watched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_harness import SchedulerStandIn, as_ordinary_user, poll_until

from crater_agent import disks

MIB = 1024**2
HOG = "import time\nheld = []\nwhile True:\n    held.append(bytearray(4 << 20))\n    time.sleep(0.02)\n"
ESCAPES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
"""


def _pid_in_log(scheduler: SchedulerStandIn, allocation: str) -> int:
    return int(poll_until(lambda: scheduler.running(allocation) and scheduler.read_log_text(allocation).strip()))


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def test_more_memory_than_asked_for_ends_a_task_with_the_numbers(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", [sys.executable, "-c", HOG], memory_bytes=64 * MIB)
    end = scheduler.final("a", 30)
    enforced = scheduler.declaration.enforcement.value == "enforced"
    assert end.status.value == "failed"
    assert end.reason.code.value == ("oom_killed" if enforced else "memory_exceeded")
    assert end.reason.facts["limit_bytes"] == 64 * MIB
    assert 60 * MIB < end.reason.facts["peak_bytes"] < 200 * MIB


def test_a_memory_kill_of_a_child_is_told_though_the_parent_survives(start, scheduler: SchedulerStandIn):
    start()
    parent = f"import subprocess, sys\nsys.exit(subprocess.run([sys.executable, '-c', {HOG!r}]).returncode != 0)"
    scheduler.give("a", [sys.executable, "-c", parent], memory_bytes=64 * MIB)
    end = scheduler.final("a", 30)
    assert end.reason.code.value in ("oom_killed", "memory_exceeded")


def test_watched_memory_is_warned_of_then_stopped(start, scheduler: SchedulerStandIn):
    start(cgroups="off")
    slow = "import time\nheld = bytearray(70 << 20)\nprint('up', flush=True)\ntime.sleep(60)\n"
    scheduler.give("a", [sys.executable, "-c", slow], memory_bytes=72 * MIB)
    end = scheduler.final("a", 30)
    assert (end.status.value, end.reason.code.value) == ("failed", "memory_exceeded")
    assert end.reason.facts["limit_bytes"] == 72 * MIB
    assert 72 * MIB < end.reason.facts["peak_bytes"] < 83 * MIB
    warned = [report for report in scheduler.reports_of("a") if report.status.value == "running" and report.reason]
    assert warned[0].reason.code.value == "over_memory"


def test_an_agent_without_rights_says_so_and_watches(start, scheduler: SchedulerStandIn, place: Path):
    start(**as_ordinary_user(place / "agent-n1"))
    assert scheduler.declaration.enforcement.value == "watched"
    assert any("limits are watched, not enforced: cgroup" in note for note in scheduler.declaration.notes)
    scheduler.give("hog", ["python3", "-c", HOG], memory_bytes=64 * MIB)
    scheduler.give("loose", ["python3", "-c", ESCAPES, "0.1"])
    end = scheduler.final("hog", 30)
    assert (end.reason.code.value, end.reason.facts["limit_bytes"]) == ("memory_exceeded", 64 * MIB)
    assert scheduler.final("loose").status == "succeeded"
    assert _is_gone(int(scheduler.read_log_text("loose").strip()))


@pytest.mark.parametrize("cgroups", ["auto", "off"])
def test_a_child_that_left_the_session_dies_with_its_task(start, scheduler: SchedulerStandIn, cgroups: str):
    start(cgroups=cgroups)
    scheduler.give("a", [sys.executable, "-c", ESCAPES, "60"], grace_ms=200)
    pid = _pid_in_log(scheduler, "a")
    scheduler.change("a", stop=True)
    scheduler.final("a")
    assert _is_gone(pid)


@pytest.mark.parametrize("cgroups", ["auto", "off"])
def test_what_a_task_leaves_behind_is_ended_before_its_end_is_told(start, scheduler: SchedulerStandIn, cgroups: str):
    start(cgroups=cgroups)
    scheduler.give("a", [sys.executable, "-c", ESCAPES, "0.2"])
    assert scheduler.final("a").status == "succeeded"
    assert _is_gone(int(scheduler.read_log_text("a").strip()))


def test_a_child_with_another_environment_that_left_the_session_dies_too(start, scheduler: SchedulerStandIn):
    start(cgroups="off")
    # Seen while its parent lived, it stays known though nothing about it says whose it is.
    script = f"env -i setsid {sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)' & sleep 2.5"
    scheduler.give("a", ["sh", "-c", script])
    assert scheduler.final("a").status == "succeeded"
    assert _is_gone(int(scheduler.read_log_text("a").strip()))


def test_a_fork_bomb_is_held_and_ended(start, scheduler: SchedulerStandIn):
    start()
    if scheduler.declaration.enforcement.value != "enforced":
        return
    bomb = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(0.05)\n"
    scheduler.give("a", [sys.executable, "-c", bomb], time_limit_ms=1_500, grace_ms=100, memory_bytes=4096 * MIB, cpu_milli=300)
    end = scheduler.final("a", 60)
    assert end.reason.code.value == "time_limit"
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and b"os.fork()\n    except" in _command(pid)]  # noqa: PTH208


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_cpu_is_held_to_its_share(start, scheduler: SchedulerStandIn):
    start()
    if scheduler.declaration.enforcement.value != "enforced":
        return
    spin = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass\n"
    scheduler.give("a", [sys.executable, "-c", spin], cpu_milli=200)
    assert scheduler.final("a").use.cpu_ms < 1_200


def test_whole_cores_are_its_own_where_the_operator_wants_that(start, scheduler: SchedulerStandIn, place: Path):
    agent = start(exclusive_cores=True)
    if scheduler.declaration.enforcement.value != "enforced" or len(os.sched_getaffinity(0)) < 2:
        return
    on = "import os, sys\nfor line in sys.stdin: print(sorted(os.sched_getaffinity(0)), flush=True)\n"
    for name in ("half", "whole"):
        os.mkfifo(place / name)
    writers = {name: os.open(place / name, os.O_RDWR) for name in ("half", "whole")}

    def cores(name: str, answers: int) -> list[int]:
        os.write(writers[name], b"?\n")
        return json.loads(poll_until(lambda: scheduler.read_log_text(name).splitlines()[answers - 1 :])[0])

    everything = sorted(os.sched_getaffinity(0))
    scheduler.give("half", ["sh", "-c", f"exec {sys.executable} -c '{on}' < {place}/half"], cpu_milli=500)
    scheduler.running("half")
    assert cores("half", 1) == everything
    scheduler.give("whole", ["sh", "-c", f"exec {sys.executable} -c '{on}' < {place}/whole"], cpu_milli=1000)
    scheduler.running("whole")
    assert len(own := cores("whole", 1)) == 1
    assert cores("half", 2) == [core for core in everything if core not in own]
    agent.kill()
    agent.restart()
    poll_until(lambda: len(scheduler.declarations) == 2)
    scheduler.take("whole")
    scheduler.final("whole")
    groups = Path(f"/sys/fs/cgroup/cpuset/{agent.group_name}")
    given = f"{everything[0]}-{everything[-1]}"
    poll_until(lambda: {path.read_text().strip() for path in groups.glob("*/cpuset.cpus")} == {given}, what="all cores back")
    assert cores("half", 3) == everything


def test_more_disk_than_asked_for_ends_a_task_with_the_numbers(start, scheduler: SchedulerStandIn):
    start(scratch={"hard_limit": "off"})
    scheduler.give("a", ["sh", "-c", "head -c 30000000 /dev/zero > fat; sleep 60"], disk_bytes=20_000_000)
    end = scheduler.final("a", 20)
    assert (end.reason.code.value, end.reason.facts["limit_bytes"]) == ("disk_exceeded", 20_000_000)
    assert end.reason.facts["peak_bytes"] > 20_000_000


def test_scratch_space_of_a_fixed_size_is_full_at_its_limit_and_the_end_says_so(start, scheduler: SchedulerStandIn, place: Path):
    if os.geteuid() != 0:
        return
    agent = start(run_as="nobody")
    before = Path("/proc/mounts").read_text().count(str(agent.data_dir))
    scheduler.give("all", ["sh", "-c", "head -c 20000000 /dev/zero > fat && stat -c %U ."], disk_bytes=20_000_000)
    assert scheduler.final("all", 20).status == "succeeded", scheduler.read_log_text("all", "stderr")
    assert scheduler.read_log_text("all") == "nobody\n"
    scheduler.give("more", ["sh", "-c", "sleep 2.2; head -c 40000000 /dev/zero > fat"], disk_bytes=20_000_000)
    end = scheduler.final("more", 20)
    assert "No space left on device" in scheduler.read_log_text("more", "stderr")
    assert (end.reason.code.value, end.reason.facts["limit_bytes"]) == ("disk_exceeded", 20_000_000)
    assert 20_000_000 <= end.reason.facts["peak_bytes"] < 25_000_000
    poll_until(lambda: Path("/proc/mounts").read_text().count(str(agent.data_dir)) == before, what="unmounted")
    poll_until(lambda: not any(path.suffix == ".img" for path in agent.data_dir.rglob("*")), what="its file removed")


def test_scratch_space_that_is_nearly_full_is_warned_of(start, scheduler: SchedulerStandIn):
    if os.geteuid() != 0:
        return
    start()
    scheduler.give("a", ["sh", "-c", "head -c 19500000 /dev/zero > fat; sleep 60"], disk_bytes=20_000_000)
    warned = poll_until(lambda: [report.reason for report in scheduler.reports_of("a") if report.reason])
    assert (warned[0].code.value, warned[0].facts["limit_bytes"]) == ("disk_nearly_full", 20_000_000)
    scheduler.change("a", stop=True)
    assert scheduler.final("a").status == "cancelled"


def test_no_scratch_space_is_left_mounted_after_a_crash(start, scheduler: SchedulerStandIn, place: Path):
    if os.geteuid() != 0:
        return
    agent = start(scratch={"keep_failed": "1h"})
    mounted = lambda: [line for line in Path("/proc/mounts").read_text().splitlines() if str(agent.data_dir) in line]  # noqa: E731
    for name, script in (("goes-on", "sleep 60"), ("fails", "echo x > kept; exit 1")):
        os.mkfifo(place / f"go-{name}")
        scheduler.give(name, ["sh", "-c", f"read line < {place}/go-{name}; {script}"], disk_bytes=20_000_000)
        scheduler.running(name)
    assert len(mounted()) == 2
    agent.kill()
    # Ended while no agent was there; the third is a mount that no record names.
    (place / "go-fails").write_text("go\n")
    stray = agent.data_dir / "scratch" / "stray"
    disks.make(agent.data_dir / "scratch/.images/stray.img", (stray.mkdir(), stray)[1], 10_000_000, 0, 0)
    poll_until(lambda: (agent.data_dir / "allocations/fails/exit.json").exists())
    agent.restart()
    assert scheduler.final("fails").reason.code.value == "exit_code"
    poll_until(lambda: len(mounted()) == 1, what="only the one that runs is mounted")
    kept = agent.data_dir / "scratch/.kept"
    poll_until(lambda: [path.name for path in kept.iterdir()] == ["fails.img"], what="the failed one's files kept")
    # Before it is taken away: opening a pipe that nobody reads any more would wait for ever.
    (place / "go-goes-on").write_text("go\n")
    scheduler.take("goes-on")
    assert scheduler.final("goes-on").status == "cancelled"
    poll_until(lambda: not mounted(), what="nothing mounted")
    loops = lambda: subprocess.run(["losetup", "-a"], capture_output=True, text=True).stdout.count(str(agent.data_dir))  # noqa: E731
    poll_until(lambda: not loops(), what="no loop device left")


def test_a_task_cannot_read_what_the_agent_keeps(start, scheduler: SchedulerStandIn, place: Path):
    if os.geteuid() != 0:
        return
    agent = start(run_as="nobody")
    scheduler.give(
        "a", ["sh", "-c", f"id -u; touch mine && ls -n mine; cat {agent.data_dir}/lease.json; kill -0 {agent.pid}; true"]
    )
    scheduler.final("a")
    out, err = scheduler.read_log_text("a"), scheduler.read_log_text("a", "stderr")
    assert out.splitlines()[0] == "65534"
    assert "65534" in out.splitlines()[1]
    assert "Permission denied" in err
    assert "not permitted" in err


def test_the_signal_that_ends_a_task_goes_to_its_children_too(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["sh", "-c", "sh -c \"trap 'echo child; exit' TERM; echo up; while :; do sleep 0.05; done\" & wait"])
    poll_until(lambda: scheduler.running("a") and scheduler.read_log_text("a") == "up\n")
    scheduler.change("a", stop=True)
    end = scheduler.final("a")
    assert end.exit_code == 128 + signal.SIGTERM
