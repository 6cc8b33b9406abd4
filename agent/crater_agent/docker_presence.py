"""Whether a container engine is there: finds it again when it was away, and hears from it what ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from crater_agent.docker_calls import Calls
from crater_agent.docker_engine import Engine
from crater_agent.docker_spec import EngineFacts
from crater_core.errors import RuntimeFailed

log = logging.getLogger("crater.agent.docker")
LOOK_S = (0.2, 5.0)
"""How soon an engine that went away is looked for again, at first and at most."""
AWAY_S = 5.0
"""An engine that is away for longer than a restart takes is no longer offered."""
GIVEN_UP_S = 20.0
"""A container whose processes are gone while its engine stays away so long has ended with it."""


class Listener(Protocol):
    def on_offer(self, yes: bool) -> None:
        """The engine has come, or has stayed away."""
        ...

    def on_listening(self) -> None:
        """From here on nothing is missed: what has ended before is seen by looking."""
        ...

    def on_end(self, allocation: str) -> None: ...

    def on_given_up(self) -> None:
        """It is away for so long that what has no process any more has ended. Called again until the engine is back."""
        ...


@dataclass(slots=True)
class Presence:
    engine: Engine
    socket: Path
    call: Calls
    listener: Listener
    facts: EngineFacts | None = None
    """None while it is away."""
    why_not: str = ""
    _away_since: float = 0.0
    _offered: bool = False

    async def open(self) -> EngineFacts | None:
        """A first look. None: no engine can be used now, `why_not` says why."""
        self._away_since = time.monotonic()
        await self._connect()
        self._offered = self.facts is not None
        return self.facts

    def lost(self) -> None:
        """It has just failed to answer."""
        self.facts = None

    async def attend(self) -> None:
        """Until cancelled: hears what ends, and finds the engine again when it was away."""
        delay_s = LOOK_S[0]
        while True:
            if self.facts is not None or await self._connect():
                delay_s = LOOK_S[0]
                if not self._offered:
                    self._offered = True
                    self.listener.on_offer(True)
                await self._listen()
                self.facts, self._away_since = None, time.monotonic()
                log.warning("the container engine at %s is away; its containers are left alone", self.socket)
            away_s = time.monotonic() - self._away_since
            if self._offered and away_s > AWAY_S:
                self._offered = False
                self.listener.on_offer(False)
            if away_s > GIVEN_UP_S:
                self.listener.on_given_up()
            await asyncio.sleep(delay_s)
            delay_s = min(LOOK_S[1], delay_s * 2)

    async def _connect(self) -> bool:
        if not self.socket.exists():
            self.why_not = f"no engine listens at {self.socket}"
            return False
        try:
            self.facts = await self.call(self.engine.connect)
        except RuntimeFailed as error:
            self.why_not = error.message
            return False
        log.info("containers are run by the engine at %s (version %s)", self.socket, self.facts.version)
        return True

    async def _listen(self) -> None:
        """Hear of ends until the engine goes away."""
        loop, heard = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def tell(allocation: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(heard.put_nowait, allocation)

        def listen() -> None:
            try:
                for allocation in self.engine.ends(lambda: tell("")):
                    tell(allocation)
            except RuntimeFailed as error:
                log.debug("%s", error.message)
            finally:
                tell(None)

        threading.Thread(target=listen, name="docker events", daemon=True).start()
        while (allocation := await heard.get()) is not None:
            if allocation:
                self.listener.on_end(allocation)
            else:
                self.listener.on_listening()
