"""What a lease asks for is what runs, and what is reported is what happened."""

from __future__ import annotations

import socket
import sys

import pytest
from agent_harness import SchedulerStandIn, poll_until

from crater_core.wire.resources import GrantView


@pytest.fixture(autouse=True)
def _agent(start):
    return start()


def test_a_process_runs_and_its_end_is_reported_after_its_start(scheduler: SchedulerStandIn):
    scheduler.give("a", ["sh", "-c", "echo out; echo err >&2; exit 0"])
    assert scheduler.final("a").status == "succeeded"
    assert [report.status.value for report in scheduler.reports_of("a")] == ["running", "succeeded"]
    assert (scheduler.read_log_text("a"), scheduler.read_log_text("a", "stderr")) == ("out\n", "err\n")


def test_an_exit_code_and_a_foreign_signal_are_told_apart(scheduler: SchedulerStandIn):
    scheduler.give("code", ["sh", "-c", "exit 3"])
    scheduler.give("signal", ["sh", "-c", "kill -USR1 $$"])
    code, signal = scheduler.final("code"), scheduler.final("signal")
    assert (code.status.value, code.exit_code, code.reason.code.value) == ("failed", 3, "exit_code")
    assert (signal.exit_code, signal.reason.facts) == (128 + 10, {"signal": 10})


def test_the_environment_is_what_was_granted_and_nothing_of_the_agents(place, start, scheduler: SchedulerStandIn):
    scheduler.give("a", ["env"], env={"OWN": "1"}, ports=[20_001, 20_002], cpu_milli=3000, attempt=2)
    scheduler.final("a")
    env = dict(line.split("=", 1) for line in scheduler.read_log_text("a").splitlines())
    assert env.pop("PATH").split(":")[0] == str(__import__("pathlib").Path(sys.executable).parent)
    for noise in ("PWD", "SHLVL", "_", "TZ"):
        env.pop(noise, None)
    scratch = env.pop("CRATER_SCRATCH_DIR")
    assert scratch.endswith("/scratch/a")
    assert env == {
        "HOME": env["HOME"],
        "LANG": "C.UTF-8",
        "TMPDIR": scratch,
        "PYTHONUNBUFFERED": "1",
        "OWN": "1",
        "OMP_NUM_THREADS": "3",
        "CRATER_TASK_ID": "task-a",
        "CRATER_ALLOCATION_ID": "a",
        "CRATER_NODE": "n1",
        "CRATER_ATTEMPT": "2",
        "CRATER_MEMBER": "0",
        "CRATER_MEMBERS": "1",
        "CRATER_CPU_MILLI": "3000",
        "CRATER_MEMORY_BYTES": str(256 * 1024**2),
        "CRATER_PORT": "20001",
        "CRATER_PORTS": "20001,20002",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_no_descriptor_of_the_agent_reaches_a_task(scheduler: SchedulerStandIn):
    scheduler.give(
        "a", [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd'))[:3], os.getsid(0) == os.getpid())"]
    )
    scheduler.final("a")
    assert scheduler.read_log_text("a") == "['0', '1', '2'] True\n"
    # The listing itself takes descriptor 3, and no more are there.
    scheduler.give("b", [sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"])
    scheduler.final("b")
    assert scheduler.read_log_text("b") == "4\n"


def test_the_port_stands_in_the_command(scheduler: SchedulerStandIn):
    scheduler.give("a", ["echo", "--port={port}", "{other}"], ports=[20_007])
    scheduler.final("a")
    assert scheduler.read_log_text("a") == "--port=20007 {other}\n"


def test_a_simulated_gpu_is_hidden_from_cuda_and_said_to_be_simulated(scheduler: SchedulerStandIn):
    grant = GrantView(uuid="GPU-SIM-n1-0", index=0, compute_milli=250, memory_mib=6144, sharing="mps", simulated=True)
    scheduler.give(
        "a", ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES|$CRATER_SIMULATED_GPU|$CRATER_GPU_MEMORY_MIB"'], devices=[grant]
    )
    scheduler.final("a")
    assert scheduler.read_log_text("a") == "|1|6144\n"


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"command": ["no-such-program"]}, "no-such-program was not found on the task's PATH"),
        ({"command": ["/etc/passwd"]}, "/etc/passwd is not executable"),
        ({"command": ["true"], "working_dir": "/no/such/dir"}, "enter the working directory /no/such/dir: No such file"),
        ({"command": ["true"], "env_profile": "absent"}, "no environment profile 'absent'"),
        ({"command": ["true"], "image": "busybox"}, "an image needs the docker runtime"),
        (
            {"command": ["true"], "mounts": [{"source": "/etc", "target": "/etc", "read_only": True}]},
            "outside this node's mount_roots",
        ),
    ],
)
def test_what_cannot_be_started_says_why(scheduler: SchedulerStandIn, fields, why):
    scheduler.give("a", **fields)
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value, end.reason.facts["retryable"]) == ("failed", "start_failed", 0)
    assert why in end.reason.facts["why"]


def test_a_port_that_somebody_listens_on_is_refused_so_that_the_scheduler_gives_another(scheduler: SchedulerStandIn):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        scheduler.give("a", ["true"], ports=[port])
        end = scheduler.final("a")
    assert (end.reason.code.value, end.reason.facts["retryable"]) == ("start_failed", 1)
    assert end.reason.facts["why"] == f"port {port} is in use by another program on this node"


def test_a_cancelled_task_may_clean_up_in_its_grace(scheduler: SchedulerStandIn):
    scheduler.give("a", ["sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; sleep 60 & wait"])
    poll_until(lambda: scheduler.running("a") and scheduler.read_log_text("a") == "up\n")
    scheduler.change("a", stop=True)
    assert scheduler.final("a").status == "cancelled"
    assert scheduler.read_log_text("a") == "up\nbye\n"


def test_what_ignores_the_request_is_killed_after_its_grace(scheduler: SchedulerStandIn):
    scheduler.give("a", ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"], grace_ms=300)
    poll_until(lambda: scheduler.running("a") and scheduler.read_log_text("a") == "up\n")
    scheduler.change("a", stop=True)
    end = scheduler.final("a")
    assert (end.status.value, end.exit_code) == ("cancelled", 137)


def test_a_lease_that_is_off_the_list_is_stopped(scheduler: SchedulerStandIn):
    scheduler.give("a", ["sleep", "60"])
    scheduler.running("a")
    scheduler.take("a")
    assert scheduler.final("a").status == "cancelled"


def test_a_time_limit_ends_a_task_with_its_number(scheduler: SchedulerStandIn):
    scheduler.give("a", ["sleep", "60"], time_limit_ms=400)
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value, end.reason.facts) == ("failed", "time_limit", {"limit_ms": 400})


def test_what_was_started_elsewhere_in_time_is_never_started_here(scheduler: SchedulerStandIn):
    scheduler.give("a", ["true"], started=True)
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value) == ("lost", "node_lost")
    assert scheduler.read_log("a").status_code == 404


def test_a_stale_report_ends_the_workload(scheduler: SchedulerStandIn):
    scheduler.give("a", ["sleep", "60"])
    scheduler.running("a")
    scheduler.stale.add("a")
    scheduler.forget()
    agent_says_running = lambda: scheduler.heartbeats and not scheduler.heartbeats[-1]["uses"]  # noqa: E731
    poll_until(agent_says_running, what="the workload gone from the heartbeat")


def test_use_is_in_the_heartbeat_and_in_the_end(scheduler: SchedulerStandIn):
    scheduler.give("a", [sys.executable, "-c", "b = bytearray(50_000_000)\nwhile sum(range(1000)): pass"], time_limit_ms=7_000)
    poll_until(lambda: scheduler.heartbeats and scheduler.heartbeats[-1]["uses"].get("a", {}).get("cpu_ms", 0) > 1000)
    use = scheduler.heartbeats[-1]["uses"]["a"]
    assert use["memory_bytes"] > 50_000_000
    # Half a core was asked for; without a hard limit it may take a whole one.
    assert 700 < use["cpu_percent_milli"] < 2_300
    end = scheduler.final("a")
    assert end.use.cpu_ms >= 1000
    assert end.use.memory_peak_bytes > 50_000_000
