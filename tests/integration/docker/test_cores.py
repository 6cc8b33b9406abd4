"""Cores of one's own hold between processes and containers of one node: what spins in one never runs on a core of the other."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from agent_harness import AgentProcess, SchedulerStandIn, poll_until
from docker_world import DockerWorld

EVERYTHING = sorted(os.sched_getaffinity(0))
SPIN = [sys.executable, "-S", "-c", "import os\nprint(os.getpid(), flush=True)\nwhile True: pass"]
BOX = ["sh", "-c", "yes > /dev/null"]


def _pids(engine: DockerWorld, agent: AgentProcess, name: str) -> list[int]:
    """Of a container's processes, as this machine numbers them."""
    with contextlib.closing(engine.client()) as client:
        top = client.top(f"{agent.group_name}-{name}")
    at = top["Titles"].index("PID")
    return [int(process[at]) for process in top["Processes"]]


def _process(scheduler: SchedulerStandIn, name: str) -> list[int]:
    scheduler.running(name)
    return [int(poll_until(lambda: scheduler.read_log_text(name).strip()))]


def _cores(pids: list[int]) -> list[int]:
    """On which these may run, each of them."""
    (cores,) = {tuple(sorted(os.sched_getaffinity(pid))) for pid in pids}
    return list(cores)


def _ran_on(pid: int, ticks: int = 30) -> set[int]:
    """Cores that a program was seen on until it had so much more CPU time."""
    seen: set[int] = set()

    def stat() -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

    began = int(stat()[11])

    def enough() -> bool:
        now = stat()
        seen.add(int(now[36]))
        return int(now[11]) + int(now[12]) - began > ticks

    poll_until(enough, 30, "CPU time used")
    return seen


def _without(*owned: list[int]) -> list[int]:
    taken = {core for cores in owned for core in cores}
    return [core for core in EVERYTHING if core not in taken] or EVERYTHING


def _again(agent: AgentProcess, scheduler: SchedulerStandIn) -> None:
    """The agent is killed, and a new one has come."""
    agent.kill()
    before = len(scheduler.declarations)
    agent.restart()
    poll_until(lambda: len(scheduler.declarations) > before, what="a new agent")


def _can_be_tried(scheduler: SchedulerStandIn) -> bool:
    return scheduler.declaration.enforcement.value == "enforced" and len(EVERYTHING) > 1


def test_a_core_has_one_owner_whatever_runs_there_also_when_the_agent_is_killed(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start(exclusive_cores=True)
    if not _can_be_tried(scheduler):
        return
    scheduler.give("loose", BOX, image=image, cpu_milli=500)
    scheduler.running("loose")
    loose = _pids(engine, agent, "loose")
    assert _cores(loose) == EVERYTHING
    scheduler.give("own", SPIN, cpu_milli=1000)
    own = _process(scheduler, "own")
    assert len(_cores(own)) == 1
    assert _cores(loose) == _without(_cores(own))
    spinner = next(pid for pid in loose if b"yes" in Path(f"/proc/{pid}/comm").read_bytes())
    assert _ran_on(spinner) <= set(_without(_cores(own)))
    assert _ran_on(own[0]) == set(_cores(own))

    _again(agent, scheduler)
    scheduler.give("box", BOX, image=image, cpu_milli=1000)
    scheduler.running("box")
    box = _pids(engine, agent, "box")
    assert len(_cores(box)) == 1
    assert _cores(box) != _cores(own)
    with contextlib.closing(engine.client()) as client:
        asked = client.inspect_container(f"{agent.group_name}-box")["HostConfig"]["CpusetCpus"]
    assert [int(asked)] == _cores(box)
    # Where all cores have owners, those that have none share them all.
    assert _cores(loose) == _without(_cores(own), _cores(box))
    scheduler.take("own")
    scheduler.final("own")
    poll_until(lambda: _cores(loose) == _without(_cores(box)), what="the process's core given back")
    scheduler.take("box")
    scheduler.final("box")
    poll_until(lambda: _cores(loose) == EVERYTHING, what="the container's core given back")


def test_the_cores_of_a_container_are_left_by_processes_and_come_back_when_it_ends_while_no_agent_is_there(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start(exclusive_cores=True)
    if not _can_be_tried(scheduler):
        return
    scheduler.give("loose", SPIN, cpu_milli=500)
    loose = _process(scheduler, "loose")
    scheduler.give("box", BOX, image=image, cpu_milli=1000)
    scheduler.running("box")
    box = _cores(_pids(engine, agent, "box"))
    assert (len(box), _cores(loose)) == (1, _without(box))
    assert _ran_on(loose[0]) <= set(_without(box))

    _again(agent, scheduler)
    scheduler.give("second", SPIN, cpu_milli=1000)
    second = _cores(_process(scheduler, "second"))
    assert (len(second), _cores(_pids(engine, agent, "box"))) == (1, box)
    assert second != box
    scheduler.take("second")
    scheduler.final("second")
    poll_until(lambda: _cores(loose) == _without(box), what="only the container's core has an owner")

    agent.kill()
    with contextlib.closing(engine.client()) as client:
        client.kill(f"{agent.group_name}-box", signal.SIGKILL)
    agent.restart()
    scheduler.final("box")
    poll_until(lambda: _cores(loose) == EVERYTHING, what="its core given back")


def test_containers_leave_a_core_also_while_their_engine_is_dead(
    start, scheduler: SchedulerStandIn, image: str, engine: DockerWorld
):
    agent = start(exclusive_cores=True)
    if not _can_be_tried(scheduler):
        return
    scheduler.give("loose", BOX, image=image, cpu_milli=500)
    scheduler.running("loose")
    loose = _pids(engine, agent, "loose")
    engine.halt(signal.SIGKILL)
    try:
        scheduler.give("own", SPIN, cpu_milli=1000)
        own = _cores(_process(scheduler, "own"))
        assert (len(own), _cores(loose)) == (1, _without(own))
        poll_until(lambda: scheduler.declarations[-1].runtimes == ("process",), 30, "the node without containers")
    finally:
        engine.start()
    assert scheduler.final("loose", 40).reason.code.value == "engine_lost"
