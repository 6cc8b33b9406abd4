"""A network between simulated machines: slow, lossy, cut, refused; and the transport that puts httpx on it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
from simulation.loop import Process, VirtualLoop

NOBODY = contextvars.Context()
"""What is on its way belongs to no process."""


@dataclass
class Listener:
    """A process that takes requests at a host. `app` is an ASGI application."""

    process: Process
    app: Any
    open: dict[asyncio.Future[httpx.Response], None] = field(default_factory=dict)
    """Who waits for an answer, first come first."""


@dataclass
class Weather:
    """What may happen to one message, in thousandths."""

    lost: int = 0
    repeated: int = 0
    late: int = 0
    late_s_max: float = 40.0
    latency_s_max: float = 0.02


class Network:
    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop, self.rng = loop, rng
        self.weather = Weather()
        self.listeners: dict[str, Listener] = {}
        self.dark: set[str] = set()
        """Hosts that are switched off: silent, where one without a listener refuses."""
        self.cut: set[tuple[str, str]] = set()
        """(from, to): messages that way are swallowed."""

    def listen(self, host: str, process: Process, app: Any) -> None:
        self.listeners[host] = Listener(process, app)

    def hang_up(self, host: str) -> None:
        """The listener's process is gone: its machine's kernel closes what was open."""
        listener = self.listeners.pop(host, None)
        for answer in list(listener.open) if listener else ():
            if host not in self.dark:
                self.loop.call_later(0.001, _fail, answer, httpx.ReadError("connection reset"), context=NOBODY)

    def reaches(self, source: str, target: str) -> bool:
        return source not in self.dark and target not in self.dark and (source, target) not in self.cut

    def refuses(self, source: str, target: str) -> bool:
        return self.reaches(source, target) and self.reaches(target, source) and target not in self.listeners

    def latency_s(self) -> float:
        return 0.0005 + self.rng.random() * self.weather.latency_s_max

    def travels(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        """One message on its way: it may be lost, come late, or come twice."""
        weather, rng = self.weather, self.rng
        copies = 0 if rng.randrange(1000) < weather.lost else 2 if rng.randrange(1000) < weather.repeated else 1
        for _ in range(copies):
            late = rng.random() * weather.late_s_max if rng.randrange(1000) < weather.late else 0.0
            self.loop.call_later(self.latency_s() + late, self._arrive, source, target, arrive, context=NOBODY)

    def _arrive(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        if self.reaches(source, target):
            arrive()


def _fail(answer: asyncio.Future[httpx.Response], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()


class Transport(httpx.AsyncBaseTransport):
    """One machine's way out."""

    def __init__(self, network: Network, source: str) -> None:
        self.network, self.source = network, source

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        network, source, target = self.network, self.source, request.url.host
        timeouts = request.extensions["timeout"]
        if not network.reaches(source, target) or not network.reaches(target, source):
            await asyncio.sleep(timeouts["connect"])
            raise httpx.ConnectTimeout("no answer")
        await asyncio.sleep(network.latency_s())
        listener = network.listeners.get(target)
        if listener is None:
            raise httpx.ConnectError("connection refused")
        answer: asyncio.Future[httpx.Response] = asyncio.get_running_loop().create_future()
        body = await request.aread()

        def arrive() -> None:
            if not listener.process.alive:
                _fail(answer, httpx.ReadError("connection reset"))
                return
            listener.open[answer] = None
            listener.process.run(self._serve(listener, request, body, answer))

        network.travels(source, target, arrive)
        try:
            async with asyncio.timeout(timeouts["read"]):
                return await answer
        except TimeoutError:
            raise httpx.ReadTimeout("no answer in time") from None
        finally:
            listener.open.pop(answer, None)

    async def _serve(self, listener: Listener, request: httpx.Request, body: bytes, answer: Any) -> None:
        status, content = await ask(listener.app, request, body)

        def arrive() -> None:
            if not answer.done():
                answer.set_result(httpx.Response(status, content=content))

        self.network.travels(request.url.host, self.source, arrive)


async def ask(app: Any, request: httpx.Request, body: bytes) -> tuple[int, bytes]:
    """One request through an ASGI application."""
    scope = {
        "type": "http",
        "method": request.method,
        "path": request.url.path,
        "query_string": request.url.query,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
