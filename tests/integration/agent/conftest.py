"""A scheduler stand-in and agents that are ended, with all they started, when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess, SchedulerStandIn, stand_in, start_agent


@pytest.fixture
def scheduler() -> Iterator[SchedulerStandIn]:
    with stand_in() as running:
        yield running


StartAgent = Callable[..., AgentProcess]


@pytest.fixture
def start(place: Path, scheduler: SchedulerStandIn) -> Iterator[StartAgent]:
    """`start(name="n1", **overrides)`: an agent of the stand-in."""
    agents: list[AgentProcess] = []

    def begin(name: str = "n1", **overrides: object) -> AgentProcess:
        agent = start_agent(place, scheduler.url, name, **overrides)  # type: ignore[arg-type]
        agents.append(agent)
        return agent

    yield begin
    for agent in agents:
        agent.stop()
