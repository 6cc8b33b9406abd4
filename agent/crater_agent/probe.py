"""Asks a replica whether it is well: HTTP GET on its own port. `step` decides, `Prober` asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from crater_agent.outbound import httpx
from crater_agent.workload import Workload
from crater_core.model.reason import Reason, ReasonCode

log = logging.getLogger("crater.agent.probe")
FIRST_INTERVAL_MS = 100
START_MS_MAX = 60_000
"""A replica that has not been ready once after this (or after `failures_max` intervals, if that is longer) has failed."""


@dataclass(frozen=True, slots=True)
class Health:
    was_ready: bool = False
    ready: bool = False
    failures: int = 0
    unhealthy: Reason | None = None


def step(health: Health, error: str, age_ms: int, interval_ms: int, failures_max: int) -> Health:
    """After one probe; `error` is empty when it was well, `age_ms` how long the replica has been running."""
    if not error:
        return Health(was_ready=True, ready=True)
    failures = health.failures + 1
    too_late = not health.was_ready and age_ms >= max(START_MS_MAX, interval_ms * failures_max)
    if too_late or (health.was_ready and failures >= failures_max):
        reason = Reason.of(ReasonCode.UNHEALTHY, failures=failures, why=error)
        return replace(health, ready=False, failures=failures, unhealthy=reason)
    return replace(health, failures=failures)


class Prober:
    """One task a replica. `on_change` is called when `ready` or `unhealthy` of a workload has changed."""

    def __init__(self, on_change: Callable[[Workload], None], now_ms: Callable[[], int]) -> None:
        self._on_change = on_change
        self._now_ms = now_ms
        self._client: httpx.AsyncClient | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, workload: Workload) -> None:
        if workload.record.health and workload.record.ports and workload.allocation not in self._tasks:
            self._tasks[workload.allocation] = asyncio.create_task(self._probe(workload))

    def forget(self, allocation: str) -> None:
        task = self._tasks.pop(allocation, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for name in list(self._tasks):
            self.forget(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    async def _probe(self, workload: Workload) -> None:
        check = workload.record.health or {}
        interval_ms, failures_max = int(check["interval_ms"]), int(check["failures_max"])
        url = f"http://127.0.0.1:{workload.record.ports[0]}/{str(check['path']).lstrip('/')}"
        health = Health(was_ready=workload.ready, ready=workload.ready)
        began_ms = self._now_ms()
        while workload.running and health.unhealthy is None:
            error = await self._ask(url, int(check["timeout_ms"]))
            age_ms = self._now_ms() - began_ms
            before, health = health, step(health, error, age_ms, interval_ms, failures_max)
            if (health.ready, health.unhealthy) != (before.ready, before.unhealthy) and workload.running:
                workload.ready, workload.unhealthy = health.ready, health.unhealthy
                log.info("%s: ready is %s %s", workload.allocation, health.ready, error)
                self._on_change(workload)
            # Often at first, so that a replica serves as soon as it can.
            wait_ms = interval_ms if health.was_ready else min(interval_ms, max(FIRST_INTERVAL_MS, age_ms // 10))
            await asyncio.sleep(wait_ms / 1000)

    async def _ask(self, url: str, timeout_ms: int) -> str:
        if self._client is None:
            # A fresh connection each time: a kept one would say nothing about whether a new caller gets through.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._client = httpx.AsyncClient(trust_env=False, verify=False, limits=limits)
        try:
            answer = await self._client.get(url, timeout=timeout_ms / 1000)
        except httpx.TimeoutException:
            return f"no answer within {timeout_ms} ms"
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if answer.status_code < 400 else f"it answers with status {answer.status_code}"
