"""Agents and engines that crash and come back: containers go on, ends are told once, what is foreign is not touched."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from agent_harness import AgentProcess, SchedulerStandIn, poll_until
from docker_world import DockerWorld


def _containers(engine: DockerWorld, agent: AgentProcess | None = None) -> list[dict[str, Any]]:
    filters = {"label": [f"crater.agent={agent.group_name}"]} if agent else {}
    with contextlib.closing(engine.client()) as client:
        return client.containers(all=True, filters=filters)


def _kill(engine: DockerWorld, name: str, number: int = signal.SIGKILL) -> None:
    with contextlib.closing(engine.client()) as client:
        client.kill(name, number)


def _ends(scheduler: SchedulerStandIn, allocation: str) -> int:
    return len([report for report in scheduler.reports_of(allocation) if report.status.ended])


def test_a_container_outlives_its_agent_and_is_taken_over_with_its_output_whole(
    start, place: Path, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start(mount_roots=[str(place)])
    (place / "m").mkdir()
    script = "i=0; while [ ! -e /m/go ]; do i=$((i+1)); echo line $i; sleep 0.01; done; echo last $i; exit 5"
    mounts = [{"source": f"{place}/m", "target": "/m", "read_only": True}]
    scheduler.give("a", ["sh", "-c", script], image=image, mounts=mounts)
    poll_until(lambda: scheduler.running("a") and "line 20\n" in scheduler.read_log_text("a"))
    agent.kill()
    heard = len(scheduler.reports)
    agent.restart()
    poll_until(lambda: len(scheduler.reports) > heard, what="a report of the new agent")
    assert scheduler.reports[-1].status == "running"
    (place / "m/go").touch()
    end = scheduler.final("a")
    assert (end.status.value, end.exit_code) == ("failed", 5)
    lines = scheduler.read_log_text("a").splitlines()
    count = int(lines[-1].split()[1])
    assert count > 20
    assert lines[:-1] == [f"line {number}" for number in range(1, count + 1)]
    poll_until(lambda: not _containers(engine, agent), what="the container removed")


def test_an_end_while_no_agent_was_there_is_told_once_with_its_code_and_output(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start()
    scheduler.give("code", ["sh", "-c", "trap 'echo ends; exit 7' USR1; while true; do sleep 0.05; done"], image=image)
    scheduler.give(
        "oom",
        ["sh", "-c", "trap : USR1; sleep 60 & wait; dd if=/dev/zero of=/dev/null bs=200M count=1"],
        image=image,
        memory_bytes=32 * 1024**2,
    )
    scheduler.running("code")
    scheduler.running("oom")
    agent.kill()
    for name in ("code", "oom"):
        _kill(engine, f"{agent.group_name}-{name}", signal.SIGUSR1)
    poll_until(lambda: all(one["State"] == "exited" for one in _containers(engine, agent)), what="both ended")
    agent.restart()
    code, oom = scheduler.final("code"), scheduler.final("oom")
    assert (code.reason.code.value, code.exit_code, scheduler.read_log_text("code")) == ("exit_code", 7, "ends\n")
    assert (oom.reason.code.value, oom.reason.facts["peak_bytes"]) == ("oom_killed", 32 * 1024**2)
    agent.kill()
    agent.restart()
    poll_until(lambda: len(scheduler.declarations) == 3, what="the third agent")
    poll_until(lambda: not _containers(engine, agent), what="the containers removed")
    assert (_ends(scheduler, "code"), _ends(scheduler, "oom")) == (1, 1)


def test_what_nobody_wants_is_removed_and_what_is_foreign_is_left_alone(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start()
    scheduler.give("a", ["sleep", "600"], image=image, grace_ms=100)
    scheduler.running("a")
    agent.kill()
    with contextlib.closing(engine.client()) as client:
        body = {"Image": image, "Entrypoint": ["sleep", "600"], "HostConfig": {"NetworkMode": "host"}}
        ours = {"crater.agent": agent.group_name, "crater.allocation": "stray", "crater.token": "1"}
        for name, labels in (("stray", ours), ("plain", {}), ("other", {**ours, "crater.agent": "crater-other-node"})):
            client.create_container_from_config({**body, "Labels": labels}, name)
            client.start(name)
    scheduler.take("a")
    agent.restart()
    poll_until(
        lambda: {one["Names"][0] for one in _containers(engine)} == {"/plain", "/other"}, what="only the foreign ones left"
    )
    assert all(one["State"] == "running" for one in _containers(engine))
    with contextlib.closing(engine.client()) as client:
        for name in ("plain", "other"):
            client.remove_container(name, force=True)


def test_without_an_agent_the_spawner_ends_what_may_be_started_elsewhere_and_no_more(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    scheduler.timeout_ms = 4_000
    agent = start()
    scheduler.give("may", ["sleep", "600"], image=image)
    scheduler.give("not", ["sleep", "600"], image=image, restartable=False)
    scheduler.running("may")
    scheduler.running("not")
    agent.kill()
    poll_until(
        lambda: {one["Names"][0][-3:]: one["State"] for one in _containers(engine, agent)} == {"may": "exited", "not": "running"}
    )
    agent.restart()
    assert (scheduler.final("may").status.value, scheduler.final("may").reason.code.value) == ("lost", "node_lost")
    scheduler.change("not", stop=True)
    assert scheduler.final("not").status == "cancelled"


def test_an_engine_that_goes_down_takes_its_containers_along_and_they_are_lost_not_failed(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start()
    scheduler.give("a", ["sleep", "600"], image=image)
    scheduler.running("a")
    engine.halt()
    poll_until(lambda: scheduler.declarations[-1].runtimes == ("process",), 30, "the node without containers")
    scheduler.give("process", ["true"])
    assert scheduler.final("process").status == "succeeded"
    scheduler.give("early", ["true"], image=image)
    assert scheduler.final("early").reason.facts["retryable"] == 1
    engine.start()
    end = scheduler.final("a", 30)
    assert (end.status.value, end.reason.code.value) == ("lost", "engine_lost")
    poll_until(lambda: scheduler.declarations[-1].runtimes == ("process", "docker"), 30, "containers again")
    scheduler.give("later", ["true"], image=image)
    assert scheduler.final("later").status == "succeeded"
    poll_until(lambda: not _containers(engine, agent), what="the containers removed")


def _pid_of(engine: DockerWorld, name: str) -> int:
    with contextlib.closing(engine.client()) as client:
        return int(client.inspect_container(name)["State"]["Pid"])


def test_an_engine_that_is_killed_leaves_tasks_running_that_can_be_cancelled_and_the_next_engine_settles_them(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start()
    for name in ("stays", "cancelled"):
        scheduler.give(name, ["sleep", "600"], image=image, grace_ms=200)
        scheduler.running(name)
    pids = {name: _pid_of(engine, f"{agent.group_name}-{name}") for name in ("stays", "cancelled")}
    engine.halt(signal.SIGKILL)
    poll_until(lambda: scheduler.declarations[-1].runtimes == ("process",), 30, "the node without containers")
    scheduler.change("cancelled", stop=True)
    poll_until(lambda: not _lives(pids["cancelled"]), what="the cancelled one ended without an engine")
    assert _lives(pids["stays"])
    assert not [report for report in scheduler.reports_of("stays") if report.status.ended]
    engine.start()
    assert (scheduler.final("cancelled", 40).status.value, scheduler.final("cancelled").reason.code.value) == (
        "cancelled",
        "cancelled",
    )
    end = scheduler.final("stays", 40)
    assert (end.status.value, end.reason.code.value) == ("lost", "engine_lost")
    assert not _lives(pids["stays"])
    poll_until(lambda: not _containers(engine, agent), what="the containers removed")
    assert len([report for report in scheduler.reports if report.status.ended]) == 2


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def test_fifty_rounds_leave_nothing(start, place: Path, scheduler: SchedulerStandIn, image: str, engine: DockerWorld):
    agent = start()
    poll_until(lambda: scheduler.declarations)
    before = set(os.listdir("/proc"))  # noqa: PTH208
    for number in range(50):
        scheduler.give(f"r{number}", ["sh", "-c", "echo x > $CRATER_SCRATCH_DIR/x; sleep 600 & true"], image=image)
    ends = [scheduler.final(f"r{number}", 60) for number in range(50)]
    assert [end.reason.code.value for end in ends] == ["finished"] * 50, ends
    poll_until(lambda: not _containers(engine, agent), what="the containers removed")
    poll_until(lambda: not list((agent.data_dir / "scratch").iterdir()), what="the scratch directories removed")
    poll_until(lambda: not list((agent.data_dir / "allocations").iterdir()), what="the records removed")
    poll_until(lambda: not _layers(engine), what="the layers unmounted")
    left = [pid for pid in set(os.listdir("/proc")) - before if pid.isdigit() and _is_ours(pid, agent)]  # noqa: PTH208
    assert not left


def _layers(engine: DockerWorld) -> list[str]:
    """File systems of its containers that are mounted."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [mount for mount in mounts if mount.startswith(str(engine.root)) and "/overlay2/" in mount]


def _is_ours(pid: str, agent: AgentProcess) -> bool:
    with contextlib.suppress(OSError):
        return os.fsencode(f"{agent.data_dir}/scratch") in Path(f"/proc/{pid}/environ").read_bytes()
    return False
