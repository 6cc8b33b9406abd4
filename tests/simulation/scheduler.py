"""The simulated scheduler process: the real engine, watch and routes over a store that may be slow, fail, or lose an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from simulation.checks import Ledger
from simulation.loop import Clock, Process, VirtualLoop
from simulation.network import Network
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import CraterError, StoreUnavailable
from crater_core.lifecycle.changes import Changes
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
from crater_core.service.routes_agents import AgentRoutes
from crater_core.service.routes_services import ServiceRoutes
from crater_core.service.routes_tasks import TaskRoutes
from crater_core.service.watch import Watch
from crater_core.store import Committed, MemoryStore, SubmitKey

HEARTBEAT_MS, TIMEOUT_MS, FORGET_MS = 10_000, 30_000, 240_000


class Store(MemoryStore):
    """What is committed outlives every process. Each commit is checked before anybody hears of it."""

    def __init__(self, ledger: Ledger, rng: Random) -> None:
        super().__init__()
        self.ledger, self.rng = ledger, rng
        self.broken = False
        self.answers_lost = 0
        """In thousandths: the commit is durable, and its caller hears of a failure."""

    def begin_term(self) -> int:
        term = super().begin_term()
        self.ledger.new_term(term)
        return term

    def commit(self, changes: Changes, expected_revision: int, term: int, keys: Sequence[SubmitKey] = ()) -> Committed:
        if self.broken:
            raise StoreUnavailable("the disk is full")
        committed = super().commit(changes, expected_revision, term, keys)
        self.ledger.committed(changes, committed.revision, term)
        if self.rng.randrange(1000) < self.answers_lost:
            raise StoreUnavailable("the connection was lost before the answer")
        return committed


class SchedulerHost:
    """A machine on which the scheduler is started and killed."""

    def __init__(self, loop: VirtualLoop, network: Network, rng: Random, store: Store, settings: Settings, name: str) -> None:
        self.loop, self.network, self.rng, self.store = loop, network, rng, store
        self.settings, self.name = settings, name
        self.clock = Clock(loop)
        self.engine: Engine | None = None
        self.slow_s_max = 0.01
        self.policies: tuple[QuotaPolicy, ...] = ()
        self.process = self._new_process()
        self.process.kill()

    def _new_process(self) -> Process:
        process = Process(self.loop, f"scheduler@{self.name}", lambda: self.network.hang_up(self.name))
        process.disk = lambda: self.rng.random() * self.slow_s_max
        return process

    def start(self) -> None:
        if not self.process.alive:
            self.process = self._new_process()
            self.process.run(self._serve(self.process))

    def kill(self) -> None:
        self.process.kill()

    async def _serve(self, process: Process) -> None:
        try:
            engine = Engine(self.store, self.settings, self.clock)
        except StoreUnavailable:
            process.kill()
            return
        engine.ids = Ids(self.clock, self.rng.getrandbits)
        self.engine = engine
        engine.start()
        await _until_done(lambda: engine.happen(*[PolicySet(policy) for policy in self.policies]))
        nobody: Any = None
        hub = Hub(engine, nobody, HEARTBEAT_MS, TIMEOUT_MS)
        agents, tasks, services = AgentRoutes(hub), TaskRoutes(hub), ServiceRoutes(hub)
        app = Gate(HotPaths(_others(agents, tasks, services), tasks, agents), Guard(()))
        self.network.listen(self.name, process, app)
        watch = asyncio.get_running_loop().create_task(Watch(engine, TIMEOUT_MS, FORGET_MS, HistorySettings()).run())
        await engine.stale.wait()
        watch.cancel()
        process.kill()


async def _until_done(call: Callable[[], Any]) -> None:
    while True:
        try:
            await call()
        except StoreUnavailable:
            await asyncio.sleep(1)
        else:
            return


def _others(agents: AgentRoutes, tasks: TaskRoutes, services: ServiceRoutes) -> Any:
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
            case "PUT", ["services", name]:
                return await services.deploy(request, name)
            case "POST", ["services", name, "scale"]:
                return await services.scale(request, name)
            case "DELETE", ["services", name]:
                return await services.remove(request, name)
            case _:
                return plain_problem(404, "not_found", "no such path")

    return app
