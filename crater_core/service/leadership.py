"""One of several schedulers leads and the others follow: campaigns, renews in time, steps down, takes in what is committed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from crater_core.errors import CraterError, StaleTerm
from crater_core.service.engine import Engine
from crater_core.store.protocol import Leader, SharedStore

log = logging.getLogger("crater.leadership")
RENEWALS = 3
"""Times that a leader renews in one lease."""
WAIT_S = 2.0
TRY_AGAIN_S = 0.3


class Leadership:
    """Runs beside the engine, with a thread of its own: an election must not wait for a long read."""

    def __init__(
        self, engine: Engine, store: SharedStore, name: str, url: str, lease_ms: int, on_lead: Callable[[], Awaitable[object]]
    ) -> None:
        self._engine, self._store = engine, store
        self._name, self._url, self._lease_ms = name, url, lease_ms
        self._on_lead = on_lead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="election")
        self.term: int | None = None
        """While this scheduler leads."""
        self.settled = asyncio.Event()
        """Set when it is known for the first time who leads."""

    async def run(self) -> None:
        while True:
            try:
                await self._round()
                self._engine.trouble = None
            except CraterError as error:
                self._in_trouble(error)
                await asyncio.sleep(TRY_AGAIN_S)
            except Exception:
                log.exception("an election failed")
                await asyncio.sleep(TRY_AGAIN_S)

    async def resign(self, term: int | None) -> None:
        """Let another one lead at once, when this one did in this term."""
        if term is not None:
            try:
                await self._ask(self._store.resign, term)
            except CraterError as error:
                log.info("the lead could not be given up, and ends with its time: %s", error.message)
        self._thread.shutdown(wait=False)

    async def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _in_trouble(self, error: CraterError) -> None:
        if self._engine.trouble is None:
            log.warning("the store cannot be used now: %s", error.message)
        self._engine.trouble = error.message

    async def _round(self) -> None:
        asked_ms = self._engine.clock.monotonic_ms()
        leader: Leader = await self._ask(self._store.campaign, self._name, self._url, self._lease_ms)
        if leader.id == self._name:
            await self._lead(leader.term, asked_ms)
        else:
            await self._follow(leader)

    async def _lead(self, term: int, asked_ms: int) -> None:
        self.term = term
        try:
            # The term may end while everything is loaded, so it is renewed meanwhile.
            staying = asyncio.ensure_future(self._stay(term, asked_ms))
            try:
                await self._engine.lead(term, asked_ms + self._lease_ms)
                log.info("this scheduler leads now, in term %d", term)
                await self._on_lead()
                self.settled.set()
                await staying
            finally:
                staying.cancel()
                await asyncio.gather(staying, return_exceptions=True)
        finally:
            self.term = None
            await self._engine.step_down()
            log.warning("this scheduler stands by")

    async def _stay(self, term: int, asked_ms: int) -> None:
        """Until the lead is lost. A store that does not answer is asked again: it may be that nobody else can lead either."""
        engine = self._engine
        pause_s = self._lease_ms / 1000 / RENEWALS
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await engine.stale.wait()
                return
            except TimeoutError:
                pass
            asked_ms = engine.clock.monotonic_ms()
            try:
                await self._ask(self._store.renew, term)
            except StaleTerm as error:
                log.warning("this scheduler leads no more: %s", error.message)
                return
            except CraterError as error:
                self._in_trouble(error)
                pause_s = TRY_AGAIN_S
                continue
            pause_s = self._lease_ms / 1000 / RENEWALS
            engine.leads_until_ms = max(engine.leads_until_ms or 0, asked_ms + self._lease_ms)

    async def _follow(self, leader: Leader | None) -> None:
        """Until nobody leads."""
        engine, store = self._engine, self._store
        while leader is not None:
            if leader.url != engine.leader_url:
                log.info("%s leads, in term %d", leader.url, leader.term)
            engine.leader_url = leader.url
            commits = await self._ask(store.since, engine.shown.revision)
            if commits is None:
                engine.follow_anew(await self._ask(store.load))
            else:
                engine.follow(commits)
            engine.term = engine.shown.snapshot.term = leader.term
            engine.trouble = None
            self.settled.set()
            if not commits:
                left_s = min(WAIT_S, leader.left_ms / 1000 + 0.05)
                await self._ask(store.wait, engine.shown.revision, left_s)
            leader = await self._ask(store.leader)
        engine.leader_url = ""
