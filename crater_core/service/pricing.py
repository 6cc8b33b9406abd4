"""Keeps the prices of free room true: has new ones worked out beside the event loop when what tasks ask for, or the nodes, have
changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from crater_core.model.node import Node
from crater_core.model.prices import Make
from crater_core.model.resources import Request
from crater_core.scheduling.prices import price_table
from crater_core.service.engine import Engine

T = TypeVar("T")
log = logging.getLogger("crater.pricing")
STRATEGY = "fragmentation_aware"
LOOK_EVERY_S = 60.0
REQUESTS_MIN = 50
"""Fewer tell no mix: until then the strategy goes by fragmentation alone."""
CHANGE_PERCENT = 10
"""Prices are worked out anew when this part of the mix, or of the nodes, is another than they were made for."""


class Pricing:
    """One loop and one thread. The solver lets go of the interpreter while it works."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prices")
        self._requests: Counter[Request] = Counter()
        self._makes: Counter[Make] = Counter()
        """What the newest prices were made for."""

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.look()
                except Exception:
                    log.exception("no new prices; the old ones stay")
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._worker.shutdown(wait=False, cancel_futures=True)

    async def look(self) -> bool:
        """Whether prices were worked out anew. Nobody needs any until something is placed by them."""
        if not self._wanted():
            return False
        nodes, demand = tuple(self._engine.shown.snapshot.nodes.values()), self._engine.demand
        makes, requests = _makes_of(nodes), Counter(demand.counts)
        if demand.total < REQUESTS_MIN or not (_differ(makes, self._makes) or _differ(requests, self._requests)):
            return False
        self._makes, self._requests = makes, requests
        started = time.monotonic()
        prices = await asyncio.get_running_loop().run_in_executor(self._worker, price_table, nodes, demand.workload())
        took_ms = round((time.monotonic() - started) * 1000)
        self._engine.use_prices(prices)
        if prices is None:
            log.warning("no prices could be worked out; %s goes by fragmentation alone", STRATEGY)
        else:
            log.info("prices of %d makes of nodes from %d requests, in %d ms", len(prices.makes), demand.total, took_ms)
        return True

    def _wanted(self) -> bool:
        settings = self._engine.settings
        return STRATEGY in {settings.strategy, *settings.pool_strategies.values(), *self._engine.demand.strategies}


def _makes_of(nodes: Iterable[Node]) -> Counter[Make]:
    makes: Counter[Make] = Counter()
    for node in nodes:
        makes[Make.of(node)] += len(node.devices)
    return makes


def _differ(one: Counter[T], other: Counter[T]) -> bool:
    """Whether too large a part of the whole stands elsewhere."""
    all_of_one, all_of_other = one.total(), other.total()
    if not all_of_one or not all_of_other:
        return all_of_one != all_of_other
    apart = sum(abs(one[key] / all_of_one - other[key] / all_of_other) for key in one.keys() | other.keys()) / 2
    return apart * 100 >= CHANGE_PERCENT
