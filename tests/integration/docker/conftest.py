"""One real engine for the folder, a scheduler stand-in, and agents that are ended with all they started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess, SchedulerStandIn, stand_in, start_agent
from docker_world import DockerWorld


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerWorld]:
    world = DockerWorld().start()
    try:
        world.add_busybox()
        yield world
    finally:
        world.remove()


@pytest.fixture
def image(engine: DockerWorld) -> str:
    return "crater-busybox:1"


@pytest.fixture
def scheduler() -> Iterator[SchedulerStandIn]:
    with stand_in() as running:
        yield running


StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def start(place: Path, scheduler: SchedulerStandIn, engine: DockerWorld) -> Iterator[StartAgent]:
    """`start(name="n1", docker={...}, **overrides)`: an agent of the stand-in that uses the tests' engine."""
    agents: list[AgentProcess] = []

    def begin(name: str = "n1", docker: dict[str, object] | None = None, **overrides: object) -> AgentProcess:
        settings = {"socket": str(engine.socket), **(docker or {})}
        agent = start_agent(place, scheduler.url, name, docker=settings, **overrides)  # type: ignore[arg-type]
        agents.append(agent)
        return agent

    yield begin
    for agent in agents:
        print(agent.log)  # shown where the test has failed
        agent.stop()
        engine.clear({"label": [f"crater.agent={agent.group_name}"]})
