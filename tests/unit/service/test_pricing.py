"""Prices follow what tasks ask for and what nodes there are, without a cycle waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from world import a_node, a_spec

from crater_core.lifecycle.inputs import NodeRegistered
from crater_core.model.resources import Request
from crater_core.model.snapshot import Settings
from crater_core.service import pricing
from crater_core.service.demand import REQUESTS_MAX, Demand
from crater_core.service.engine import Engine
from crater_core.service.pricing import REQUESTS_MIN, Pricing
from crater_core.service.submits import Submission
from crater_core.store import MemoryStore


def tell(story: Callable[[Engine, Pricing], Awaitable[None]], settings: Settings | None = None) -> None:
    async def run() -> None:
        engine = Engine(MemoryStore(), settings or Settings(strategy="fragmentation_aware"))
        engine.start()
        try:
            await engine.happen(NodeRegistered(a_node("n1", cpu=64, gpus=4)))
            await story(engine, Pricing(engine))
        finally:
            await engine.stop()

    asyncio.run(run())


async def ask(engine: Engine, count: int, gpu: int = 1000, **more: Any) -> None:
    await engine.submit([Submission(engine.ids.new("t"), a_spec(gpu_milli=gpu, **more), None) for _ in range(count)])


def test_there_are_prices_once_enough_has_been_asked_for_and_new_ones_when_that_changes() -> None:
    async def story(engine: Engine, pricing: Pricing) -> None:
        await ask(engine, REQUESTS_MIN - 1)
        assert not await pricing.look()
        assert engine.shown.snapshot.prices is None
        await ask(engine, 1)
        assert await pricing.look()
        first = engine.shown.snapshot.prices
        assert first is not None
        assert [one.weight for one in first.workload] == [REQUESTS_MIN]
        await ask(engine, 2)
        assert not await pricing.look(), "the mix is the same"
        await ask(engine, REQUESTS_MIN, gpu=500)
        assert await pricing.look()
        assert engine.shown.snapshot.prices != first

    tell(story)


def test_prices_are_made_once_a_task_names_the_strategy_itself() -> None:
    async def story(engine: Engine, pricing: Pricing) -> None:
        await ask(engine, REQUESTS_MIN)
        assert not await pricing.look(), "nothing is placed by prices"
        await ask(engine, 1, strategy="fragmentation_aware")
        assert await pricing.look()
        assert engine.shown.snapshot.prices is not None

    tell(story, Settings(strategy="best_fit"))


def test_nodes_of_a_new_make_bring_new_prices() -> None:
    async def story(engine: Engine, pricing: Pricing) -> None:
        await ask(engine, REQUESTS_MIN)
        await pricing.look()
        await engine.happen(NodeRegistered(a_node("n2", cpu=8, gpus=2)))
        assert await pricing.look()
        prices = engine.shown.snapshot.prices
        assert prices is not None
        assert len(prices.makes) == 2

    tell(story)


def test_without_an_answer_the_strategy_goes_on_without_prices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pricing, "price_table", lambda *_: None)

    async def story(engine: Engine, pricing: Pricing) -> None:
        await ask(engine, REQUESTS_MIN)
        assert await pricing.look()
        assert engine.shown.snapshot.prices is None
        await ask(engine, 1)

    tell(story)
    assert "no prices could be worked out" in caplog.text


def test_old_requests_fade() -> None:
    demand = Demand([a_spec(cpu_milli=1)] * 100)
    for _ in range(REQUESTS_MAX - 100):
        demand.count(a_spec_of_two())
    assert {request.cpu_milli: count for request, count in demand.counts.items()} == {1: 50, 2: REQUESTS_MAX // 2 - 50}
    assert demand.total == REQUESTS_MAX // 2
    assert demand.workload()[0].request == Request(2, a_spec().request.memory_bytes)


TWO = a_spec(cpu_milli=2)


def a_spec_of_two():
    return TWO
