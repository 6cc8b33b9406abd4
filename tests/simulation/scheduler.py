"""The simulated scheduler process: the real engine, leadership, watch and routes over a store that may be slow or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from simulation.loop import Clock, Process, VirtualLoop
from simulation.network import NOBODY, Network
from simulation.store import Line, SharedStore, Store
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import CraterError, StoreUnavailable
from crater_core.lifecycle.inputs import PolicySet
from crater_core.model.quota import QuotaPolicy
from crater_core.model.snapshot import Settings
from crater_core.service.auth import Guard
from crater_core.service.config import HistorySettings
from crater_core.service.engine import Engine
from crater_core.service.gate import Gate
from crater_core.service.hot import HotPaths
from crater_core.service.http import Hub, plain_problem, problem
from crater_core.service.ids import Ids
from crater_core.service.leadership import Leadership
from crater_core.service.routes_agents import AgentRoutes
from crater_core.service.routes_arrays import ArrayRoutes
from crater_core.service.routes_services import ServiceRoutes
from crater_core.service.routes_tasks import TaskRoutes
from crater_core.service.watch import Watch

HEARTBEAT_MS, TIMEOUT_MS, FORGET_MS, LEASE_MS = 10_000, 30_000, 240_000, 10_000
START_AGAIN_S = 2.0


class SchedulerHost:
    """A machine on which the scheduler is started and killed."""

    def __init__(self, loop: VirtualLoop, network: Network, rng: Random, store: Store, settings: Settings, name: str) -> None:
        self.loop, self.network, self.rng, self.store = loop, network, rng, store
        self.settings, self.name = settings, name
        self.clock = Clock(loop)
        self._leading: asyncio.Task[None] | None = None
        self.engine: Engine | None = None
        self.leadership: Leadership | None = None
        self.slow_s_max = 0.01
        self.cut_from_store = False
        self.policies: tuple[QuotaPolicy, ...] = ()
        self.process = self._new_process()
        self.process.kill()

    def _new_process(self) -> Process:
        process = Process(self.loop, f"scheduler@{self.name}", lambda: self.network.hang_up(self.name))
        process.disk = lambda: self.rng.random() * self.slow_s_max
        if isinstance(self.store, SharedStore):
            process.sent = lambda: self.rng.random() < 0.5
        return process

    def start(self) -> None:
        if not self.process.alive:
            self.leadership = None
            self.process = self._new_process()
            self.process.run(self._serve(self.process))

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        """SIGTERM: it gives up the lead, if it has it, and ends."""
        self.process.run(self._end(self.process))

    @property
    def leads(self) -> bool:
        return self.process.alive and self.engine is not None and self.engine.leading

    async def _serve(self, process: Process) -> None:
        store: Any = self.store
        shared = isinstance(store, SharedStore)
        if shared:
            store = Line(store, self.rng, lambda: self.cut_from_store)
        try:
            engine = Engine(store, self.settings, self.clock, standby=shared)
        except StoreUnavailable:
            self.loop.call_later(START_AGAIN_S, self.start, context=NOBODY)
            process.kill()
            return
        engine.ids = Ids(self.clock, self.rng.getrandbits)
        engine.own_url = f"http://{self.name}"
        self.engine = engine
        engine.start()
        policies = [PolicySet(policy) for policy in self.policies]
        if shared:
            self.leadership = Leadership(engine, store, self.name, engine.own_url, LEASE_MS, lambda: engine.happen(*policies))
            self._leading = process.run(self.leadership.run())
            await self.leadership.settled.wait()
        else:
            await _until_done(lambda: engine.happen(*policies))
        self._listen(engine, process)
        watch = asyncio.get_running_loop().create_task(Watch(engine, TIMEOUT_MS, FORGET_MS, HistorySettings()).run())
        if not shared:
            await engine.stale.wait()
            watch.cancel()
            process.kill()
        await watch

    def _listen(self, engine: Engine, process: Process) -> None:
        nobody: Any = None
        hub = Hub(engine, nobody, HEARTBEAT_MS, TIMEOUT_MS)
        agents, tasks = AgentRoutes(hub), TaskRoutes(hub)
        app = HotPaths(_others(agents, tasks, ServiceRoutes(hub), ArrayRoutes(hub)), tasks, agents)
        self.network.listen(self.name, process, Gate(app, Guard(())))

    async def _end(self, process: Process) -> None:
        leadership = self.leadership
        if leadership is not None:
            term = leadership.term
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
            await leadership.resign(term)
        process.kill()


async def _until_done(call: Callable[[], Any]) -> None:
    while True:
        try:
            await call()
        except StoreUnavailable:
            await asyncio.sleep(1)
        else:
            return


def _others(agents: AgentRoutes, tasks: TaskRoutes, services: ServiceRoutes, arrays: ArrayRoutes) -> Any:
    """The calls that `HotPaths` does not take, without the framework, which would cost more than all the rest."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request, parts = Request(scope, receive), scope["path"].split("/")[2:]
        try:
            answer = await _answer(request, parts)
        except CraterError as error:
            answer = problem(error)
        await answer(scope, receive, send)

    async def _answer(request: Request, parts: list[str]) -> Response:
        match request.method, parts:
            case "POST", ["agents", node, "register"]:
                return await agents.register(request, node)
            case "POST", ["tasks", task, "cancel"]:
                return await tasks.cancel(request, task)
            case "POST", ["tasks:batch"]:
                return await tasks.submit_batch(request)
            case "POST", ["arrays"]:
                return await arrays.submit(request)
            case "POST", ["arrays", array, "cancel"]:
                return await arrays.cancel(request, array)
            case "PUT", ["services", name]:
                return await services.deploy(request, name)
            case "POST", ["services", name, "scale"]:
                return await services.scale(request, name)
            case "DELETE", ["services", name]:
                return await services.remove(request, name)
            case _:
                return plain_problem(404, "not_found", "no such path")

    return app
