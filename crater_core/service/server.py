"""Puts the parts of the scheduler together, serves, and takes them apart again within two seconds of a stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from types import FrameType
from typing import cast

import httpx
import uvicorn

from crater_core.errors import StaleTerm
from crater_core.lifecycle.inputs import PolicySet
from crater_core.service.app import make_app
from crater_core.service.auth import Guard
from crater_core.service.config import SchedulerConfig
from crater_core.service.engine import Engine
from crater_core.service.garbage import set_apart
from crater_core.service.http import Hub
from crater_core.service.leadership import Leadership
from crater_core.service.metrics import SchedulerMetrics
from crater_core.service.pricing import Pricing
from crater_core.service.protocol import OneWrite
from crater_core.service.watch import Watch
from crater_core.store.opening import open_store
from crater_core.store.protocol import SharedStore

log = logging.getLogger("crater.scheduler")
GRACE_S = 1
Ready = Callable[[str, str | None, SchedulerConfig], None]


async def serve(config: SchedulerConfig, listener: socket.socket, ready: Ready) -> int:
    """Until a signal comes or another scheduler takes a store over that only one may use; gives the exit code."""
    store = open_store(config.store_url, config.etcd_access())
    metrics = SchedulerMetrics()
    try:
        engine = Engine(store, config.settings(), observer=metrics, standby=config.is_shared)
        set_apart()
        engine.own_url = config.advertise_url or _url_of(listener, public=True)
        metrics.watch(engine)
        metrics_url = _serve_metrics(config, metrics)
        engine.start()
        try:
            async with _leadership(config, listener, engine):
                return await _serve(config, listener, engine, metrics, lambda url: ready(url, metrics_url, config))
        finally:
            await engine.stop()
    finally:
        metrics.stop()
        store.close()


@contextlib.asynccontextmanager
async def _leadership(config: SchedulerConfig, listener: socket.socket, engine: Engine) -> AsyncGenerator[None]:
    """Begins to lead, or to stand by; gives the lead up in the end."""
    policies = [PolicySet(body.to_policy(name)) for name, body in sorted(config.quota_policies.items())]
    if not config.is_shared:
        await engine.happen(*policies)
        yield
        return
    url = engine.own_url
    store = cast(SharedStore, engine.store)

    async def on_lead() -> None:
        set_apart()
        await engine.happen(*policies)

    leadership = Leadership(engine, store, f"{socket.gethostname()} {url}", url, config.leader_lease, on_lead)
    running = asyncio.create_task(leadership.run(), name="leadership")
    try:
        settled = asyncio.create_task(leadership.settled.wait())
        await asyncio.wait([running, settled], return_when=asyncio.FIRST_COMPLETED)
        yield
    finally:
        term = leadership.term
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await leadership.resign(term)


def _url_of(listener: socket.socket, public: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    if public and host in ("0.0.0.0", "::"):  # noqa: S104
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _serve_metrics(config: SchedulerConfig, metrics: SchedulerMetrics) -> str | None:
    if not config.metrics.enabled:
        return None
    port = metrics.serve(config.metrics.listen, config.metrics.port)
    return f"http://{config.metrics.listen}:{port}"


async def _serve(
    config: SchedulerConfig,
    listener: socket.socket,
    engine: Engine,
    metrics: SchedulerMetrics,
    ready: Callable[[str], None],
) -> int:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=200), trust_env=False) as agents:
        hub = Hub(engine, agents, config.heartbeat_interval, config.heartbeat_timeout)
        app = make_app(hub, Guard(config.tokens), metrics.count)
        server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=75,
                h11_max_incomplete_event_size=64 * 1024,
                server_header=False,
                proxy_headers=False,
                http=OneWrite,
            ),
            engine,
        )
        watch = Watch(engine, config.heartbeat_timeout, config.node_forget_after, config.history)
        others = [asyncio.create_task(watch.run(), name="watch"), asyncio.create_task(Pricing(engine).run(), name="pricing")]
        if not config.is_shared:
            others.append(asyncio.create_task(_end_when_stale(engine, server)))
        ready(_url_of(listener))
        try:
            await server.serve([listener])
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    if engine.stale.is_set() and not config.is_shared:
        raise StaleTerm("another scheduler has taken over the store")
    return 0


async def _end_when_stale(engine: Engine, server: uvicorn.Server) -> None:
    await engine.stale.wait()
    engine.bell.close()
    server.should_exit = True


class _Server(uvicorn.Server):
    """Lets those who wait go as soon as a signal comes, so that long polls do not hold up the end."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        log.info("stopping on %s", signal.Signals(sig).name)
        self._loop.call_soon_threadsafe(self._engine.bell.close)
        # A second signal must not be raised again by the server: being told to stop is a success.
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self):
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
