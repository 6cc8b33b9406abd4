"""Each test runs on the stand-ins of the driver's libraries, in `make test`, and on a real card, in `make gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_harness import AgentProcess, SchedulerStandIn, start_agent
from agent_harness import stand_in as scheduler_stand_in
from hardware.cards import Card, real, stand_in

StartAgent = Callable[..., AgentProcess]


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.hardware)])
def card(request: pytest.FixtureRequest, place: Path) -> Card:
    if request.param == "stand-in":
        return stand_in(place)
    found = real()
    if isinstance(found, str):
        pytest.skip(f"needs a real GPU: {found}")
    return found


@pytest.fixture
def scheduler() -> Iterator[SchedulerStandIn]:
    with scheduler_stand_in() as running:
        yield running


@pytest.fixture
def begin(place: Path, scheduler: SchedulerStandIn, card: Card) -> Iterator[StartAgent]:
    """An agent of the card, which looks as often as it may and gives the card out again as soon as it is well."""
    agents: list[AgentProcess] = []

    def start(**overrides: object) -> AgentProcess:
        health = {"recheck": "1s", "well_for": "0s"}
        settings = {"sample_interval": "5s", "resource_pools": None, "gpu_health": health, **overrides}
        agents.append(start_agent(place, scheduler.url, environ=card.environ, **settings))  # type: ignore[arg-type]
        return agents[-1]

    yield start
    for agent in agents:
        agent.stop()
