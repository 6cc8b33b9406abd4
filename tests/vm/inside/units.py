"""The systemd units as they are delivered: started, stopped, killed and started again by systemd itself."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from agent_harness import SchedulerStandIn, agent_config, poll_until, stand_in

MIB = 1024**2
PROJECT = Path("/project")
UNITS = Path("/etc/systemd/system")
GROUP = Path("/sys/fs/cgroup/system.slice/crater-agent.service")
ROOT = Path("/sys/fs/cgroup")
PYTHON = "/opt/crater/bin/python"
HOG = "held = []\nwhile True: held.append(bytearray(4 << 20))\n"
PATIENCE_S = 90


def systemctl(*words: str) -> str:
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + journal(words[-1])
    return done.stdout.strip()


def journal(unit: str) -> str:
    return subprocess.run(["journalctl", "-q", "-u", unit, "-n", "40"], capture_output=True, text=True, check=False).stdout


def shown(unit: str, name: str) -> str:
    return systemctl("show", "-P", name, unit)


def end_all(unit: str) -> None:
    """The unit, and what it left running on purpose."""
    subprocess.run(["systemctl", "stop", unit], check=False)
    subprocess.run(["systemctl", "kill", "--kill-whom=all", "-s", "KILL", unit], check=False, capture_output=True)
    subprocess.run(["systemctl", "reset-failed", unit], check=False, capture_output=True)
    for group in ROOT.glob("crater-guest-*"):
        (group / "cgroup.kill").write_text("1")
    poll_until(
        lambda: not pids(GROUP) and not [group for group in ROOT.glob("crater-guest-*") if pids(group)], 20, "an end of all"
    )


def pids(group: Path) -> set[int]:
    return {int(pid) for file in group.rglob("cgroup.procs") for pid in file.read_text().split()} if group.exists() else set()


def set_up(scheduler: SchedulerStandIn, *, user: str = "", **overrides: object) -> None:
    """The agent's file and its unit; `user`: by a drop-in, as the guide says."""
    Path("/etc/crater").mkdir(exist_ok=True)
    pools = [{"name": "cpu-pool", "type": "cpu", "cores": 2}, {"name": "memory-pool", "type": "memory", "size_gb": 1}]
    config = agent_config(Path("/var/lib/crater"), scheduler.url, "guest", resource_pools=pools, data_dir="/var/lib/crater/agent")
    Path("/etc/crater/agent.yaml").write_text(yaml.safe_dump({**config, **overrides}))
    shutil.copy(PROJECT / "agent/crater-agent.service", UNITS)
    dropin = UNITS / "crater-agent.service.d"
    shutil.rmtree(dropin, ignore_errors=True)
    if user:
        dropin.mkdir()
        (dropin / "user.conf").write_text(f"[Service]\nUser={user}\nGroup={user}\n")
    systemctl("daemon-reload")


@pytest.fixture(scope="module")
def scheduler() -> Iterator[SchedulerStandIn]:
    # Nothing here is about fencing, and on a busy machine the guest takes half a minute to start an agent again.
    with stand_in(timeout_ms=180_000) as scheduler:
        yield scheduler


@pytest.fixture(scope="module")
def as_root(scheduler: SchedulerStandIn) -> Iterator[SchedulerStandIn]:
    set_up(scheduler)
    systemctl("start", "crater-agent")
    poll_until(lambda: scheduler.declarations, PATIENCE_S, "a registration")
    yield scheduler
    end_all("crater-agent")


def test_the_agents_unit_gives_it_limits_to_enforce(as_root: SchedulerStandIn):
    assert as_root.declaration.enforcement.value == "enforced"
    assert shown("crater-agent", "Delegate") == "yes"
    as_root.give("a", [PYTHON, "-S", "-c", HOG], memory_bytes=48 * MIB)
    end = as_root.final("a", PATIENCE_S)
    assert (end.status.value, end.reason.code.value) == ("failed", "oom_killed")
    assert end.reason.facts["limit_bytes"] == 48 * MIB


def test_its_tasks_live_in_groups_that_do_not_keep_it_from_being_started_again(as_root: SchedulerStandIn):
    look = "print(open('/proc/self/cgroup').read(), flush=True)"
    as_root.give("where", [PYTHON, "-S", "-c", look])
    as_root.final("where", PATIENCE_S)
    # Not in the unit's own: systemd could not start the agent beside them. (One from 254 on can, and there they are.)
    assert as_root.read_log_text("where").startswith("0::/crater-guest-")


def test_a_task_opens_no_device_that_it_was_not_given(as_root: SchedulerStandIn):
    tries = "import os\ntry: os.open('/dev/vda', os.O_RDONLY); print('open')\nexcept OSError as error: print(error.errno)\n"
    as_root.give("tries", [PYTHON, "-S", "-c", tries])
    as_root.final("tries", PATIENCE_S)
    assert as_root.read_log_text("tries") == "1\n"


def test_a_restart_by_systemd_leaves_a_task_running_and_takes_it_over(as_root: SchedulerStandIn):
    as_root.give("stays", ["sh", "-c", "echo $$; exec sleep 600"])
    pid = int(poll_until(lambda: as_root.running("stays", PATIENCE_S) and as_root.read_log_text("stays").strip()))
    before, heard = shown("crater-agent", "MainPID"), len(as_root.declarations)
    systemctl("restart", "crater-agent")
    poll_until(lambda: len(as_root.declarations) > heard, PATIENCE_S, "a second registration")
    assert shown("crater-agent", "MainPID") != before
    assert Path(f"/proc/{pid}").exists()
    assert as_root.declaration.enforcement.value == "enforced"
    as_root.change("stays", stop=True)
    assert as_root.final("stays", PATIENCE_S).status.value == "cancelled"
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_agent_is_started_again_by_systemd_and_the_end_meanwhile_is_told_once(as_root: SchedulerStandIn, tmp_path: Path):
    go = tmp_path / "go"
    as_root.give("ends", ["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done; exit 7"])
    as_root.running("ends", PATIENCE_S)
    heard = len(as_root.declarations)
    systemctl("kill", "--kill-whom=main", "-s", "KILL", "crater-agent")
    go.touch()
    poll_until(lambda: len(as_root.declarations) > heard, PATIENCE_S, "a registration after the kill")
    assert as_root.final("ends", PATIENCE_S).exit_code == 7
    assert len([report for report in as_root.reports_of("ends") if report.status.ended]) == 1
    assert shown("crater-agent", "NRestarts") == "1"


def test_a_wrong_file_is_not_tried_again(scheduler: SchedulerStandIn, as_root: SchedulerStandIn):
    end_all("crater-agent")
    set_up(scheduler, listen="nowhere")
    systemctl("start", "--no-block", "crater-agent")
    poll_until(lambda: shown("crater-agent", "ActiveState") == "failed", PATIENCE_S, "a failed unit")
    assert (shown("crater-agent", "ExecMainStatus"), shown("crater-agent", "NRestarts")) == ("2", "0")


def test_an_agent_that_is_not_root_enforces_limits_in_what_was_delegated_to_it(
    scheduler: SchedulerStandIn, as_root: SchedulerStandIn
):
    end_all("crater-agent")
    shutil.rmtree("/var/lib/crater", ignore_errors=True)
    set_up(scheduler, user="crater")
    heard = len(scheduler.declarations)
    systemctl("start", "crater-agent")
    poll_until(lambda: len(scheduler.declarations) > heard, PATIENCE_S, "a registration")
    assert scheduler.declaration.enforcement.value == "enforced"
    assert any("started again only when its tasks have ended" in note for note in scheduler.declaration.notes)
    scheduler.give("hog", [PYTHON, "-S", "-c", HOG], memory_bytes=48 * MIB)
    assert scheduler.final("hog", PATIENCE_S).reason.code.value == "oom_killed"
    escapes = """
import os, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), os.getuid(), flush=True)
    time.sleep(600)
time.sleep(0.3)
"""
    scheduler.give("loose", [PYTHON, "-S", "-c", escapes])
    assert scheduler.final("loose", PATIENCE_S).status.value == "succeeded"
    pid, uid = map(int, scheduler.read_log_text("loose").split())
    assert uid == 900
    assert not Path(f"/proc/{pid}").exists()
    scheduler.give("looks", [PYTHON, "-S", "-c", "print(open('/proc/self/cgroup').read(), flush=True)"])
    scheduler.final("looks", PATIENCE_S)
    assert scheduler.read_log_text("looks").startswith("0::/system.slice/crater-agent.service/crater-guest-")


def test_the_schedulers_unit_runs_it_shut_in_and_stops_it_cleanly():
    Path("/etc/crater").mkdir(exist_ok=True)
    file = Path("/etc/crater/scheduler.yaml")
    file.write_text("listen: 127.0.0.1:8089\ndata_dir: /var/lib/crater-scheduler\nmetrics: {enabled: false}\n")
    shutil.copy(PROJECT / "deploy/crater-scheduler.service", UNITS)
    systemctl("daemon-reload")
    systemctl("start", "crater-scheduler")
    pid = int(shown("crater-scheduler", "MainPID"))

    def health() -> dict[str, object] | None:
        try:
            with urllib.request.urlopen("http://127.0.0.1:8089/health", timeout=5) as answer:
                return json.loads(answer.read())
        except OSError:
            return None

    assert poll_until(health, PATIENCE_S, journal("crater-scheduler"))["status"] == "ok"
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert status["Uid"].split()[0] == "900"
    assert (status["CapEff"], status["NoNewPrivs"]) == ("0" * 16, "1")
    assert Path("/var/lib/crater-scheduler/crater.db").stat().st_uid == 900
    began = time.monotonic()
    systemctl("stop", "crater-scheduler")
    assert time.monotonic() - began < 30
    assert (shown("crater-scheduler", "Result"), shown("crater-scheduler", "ExecMainStatus")) == ("success", "0")
