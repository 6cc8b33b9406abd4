"""One simulated life of a cluster: everything that happens in it follows from its seed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from builders import a_node
from simulation.callers import Callers
from simulation.checks import Broken, Ledger, Truth, must
from simulation.faults import FAULTS, Chaos
from simulation.loop import VirtualLoop
from simulation.machine import Machine
from simulation.network import Network
from simulation.scheduler import SchedulerHost
from simulation.store import SharedStore, Store

from crater_core.model.node import SharingMode
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.snapshot import Settings, Snapshot

CHAOS_S = 240.0
PEACE_S = 1_200.0
"""All must have ended so long after the last fault: the longest task, five attempts, back-offs of a minute."""
TRACE_KEPT = 400


@dataclass
class Outcome:
    seed: int
    faults: tuple[str, ...]
    schedulers: int = 1
    terms: int = 0
    steps: int = 0
    commits: int = 0
    starts: int = 0
    fences: int = 0
    tasks: int = 0
    lost: int = 0
    simulated_s: float = 0.0
    took_s: float = 0.0
    failure: str = ""
    digest: str = ""
    """Of the whole trace: the same seed gives the same."""
    trace: list[str] = field(default_factory=list)
    """The last lines of it."""


class World:
    def __init__(
        self,
        seed: int,
        directory: Path,
        faults: tuple[str, ...] | None = None,
        tasks: int | None = None,
        chaos_s: float = CHAOS_S,
        schedulers: int | None = None,
    ) -> None:
        self.chaos_s = chaos_s
        rng = self.rng = Random(seed)
        self.schedulers = schedulers or rng.choice([1, 2, 2])
        self.loop = VirtualLoop()
        self.trace: deque[str] = deque(maxlen=TRACE_KEPT)
        self._digest = hashlib.blake2b(digest_size=16)
        settings = Settings(preempt_min_run_ms=5_000, hold_after_ms=60_000)
        self.ledger = Ledger(settings, self.say)
        self.truth = Truth(self.ledger, self.say)
        shared = self.schedulers > 1
        self.store = SharedStore(self.ledger, self._fork(), self.loop) if shared else Store(self.ledger, self._fork())
        self.network = Network(self.loop, self._fork())
        names = [f"s{number}" for number in range(1, self.schedulers + 1)]
        endpoints = [f"http://{name}" for name in names]
        self.hosts = [SchedulerHost(self.loop, self.network, self._fork(), self.store, settings, name) for name in names]
        for host in self.hosts:
            host.policies = (QuotaPolicy("bounded", ("bounded",), Limits(cpu_milli=12_000, gpu_milli=2_000)),)
        nodes = [
            a_node("n1", cpu=8, gpus=2),
            a_node("n2", cpu=8, gpus=2, sharing=SharingMode.TIME_SLICE),
            a_node("n3", cpu=6),
            a_node("n4", cpu=4),
        ]
        self.machines = [
            Machine(self.loop, self.network, self._fork(), self.truth, node, directory / node.name, endpoints) for node in nodes
        ]
        self.callers = Callers(self.loop, self.network, self._fork(), self.ledger, self.say, endpoints)
        drawn = tuple(fault for fault in FAULTS if rng.random() < 0.3)
        self.faults = drawn if faults is None else faults
        self.chaos = Chaos(self, self._fork(), self.faults)
        self.wanted_tasks = tasks if tasks is not None else rng.choice([10, 30, 60])

    def _fork(self) -> Random:
        return Random(self.rng.getrandbits(64))

    def say(self, what: str) -> None:
        line = f"{self.loop.time():10.3f} {what}"
        self._digest.update(line.encode())
        self.trace.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    async def live(self) -> None:
        for host in self.hosts:
            host.start()
        for machine in self.machines:
            machine.boot()
        await asyncio.sleep(2)
        self.chaos.begin(self.chaos_s)
        self._plan_calls()
        await self._until(lambda: self.loop.time() >= self.chaos_s, self.chaos_s + 1)
        self.say("PEACE")
        self.chaos.heal()
        late_s = self.network.weather.late_s_max
        await self._until(lambda: not self.callers.busy, PEACE_S)
        await asyncio.sleep(late_s + 1)  # What is still on its way may deploy a service anew.
        self.callers.remove()
        await self._until(self._is_over, PEACE_S)
        self.ledger.all_is_over()
        self.truth.all_is_over()
        await self._until(self._is_calm, 120.0)
        must(self._is_calm(), "in the end agents have nothing left, and schedulers know what is in the store")

    def _plan_calls(self) -> None:
        rng, callers, chaos_s = self.rng, self.callers, self.chaos_s
        for _ in range(self.wanted_tasks):
            self.loop.call_later(rng.random() * chaos_s * 0.8, callers.submit)
        for _ in range(self.wanted_tasks // 6):
            self.loop.call_later(rng.random() * chaos_s, callers.cancel)
        if rng.random() < 0.5:
            for call in (callers.deploy, callers.scale, callers.deploy):
                self.loop.call_later(rng.random() * chaos_s * 0.8, call)

    async def _until(self, done: Callable[[], bool], within_s: float) -> None:
        until_s = self.loop.time() + within_s
        while not done() and self.loop.time() < until_s:
            await asyncio.sleep(0.5)
            if self.ledger.failure is not None:
                raise self.ledger.failure
            must(not self.loop.faults, f"an exception that nobody caught: {self.loop.faults[:1]}")

    def _is_over(self) -> bool:
        live = any(not task.status.ended for task in self.ledger.tasks.values())
        running = any(self.truth.running.values())
        return not live and not running and not self.callers.busy and not self.ledger.snapshot.services

    def _is_calm(self) -> bool:
        """Agents forget what has been reported, every node is back, and every scheduler knows what is in the store."""
        agents = [machine.agent for machine in self.machines]
        calm = all(agent is not None and not agent.workloads for agent in agents)
        knowing = all(host.engine is not None and _knows(host.engine.shown.snapshot, self.ledger.snapshot) for host in self.hosts)
        return calm and knowing and all(node.schedulable for node in self.ledger.snapshot.nodes.values())


def _knows(snapshot: Snapshot, truth: Snapshot) -> bool:
    kinds = ("tasks", "allocations", "nodes", "services", "policies", "past")
    return snapshot.revision == truth.revision and all(getattr(snapshot, kind) == getattr(truth, kind) for kind in kinds)


class _Complaints(logging.Handler):
    """A fault that somebody caught and wrote down is one all the same."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.ERROR)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            told = "".join(traceback.format_exception(*record.exc_info)[-4:])
            self._ledger.fail(Broken(f"{record.name}: {record.getMessage()}: {told}"))


@contextlib.contextmanager
def _listening_to_logs(ledger: Ledger) -> Generator[None]:
    """Nothing is written anywhere, and complaints count."""
    root, complaints = logging.getLogger("crater"), _Complaints(ledger)
    before, disabled = (root.handlers, root.propagate), root.manager.disable
    root.handlers, root.propagate = [complaints], False
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        root.handlers, root.propagate = before
        logging.disable(disabled)


def _close(loop: VirtualLoop) -> None:
    """What is taken apart has nothing to say."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    loop.close()
    logging.disable(disabled)


def simulate(
    seed: int,
    faults: tuple[str, ...] | None = None,
    tasks: int | None = None,
    chaos_s: float = CHAOS_S,
    schedulers: int | None = None,
) -> Outcome:
    """Never raises for a broken promise: the outcome has the failure and the end of the trace."""
    began = time.perf_counter()
    shared = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="crater-sim-", dir=shared if shared.is_dir() else None))
    world = World(seed, directory, faults, tasks, chaos_s, schedulers)
    loop = world.loop
    asyncio.set_event_loop(loop)
    outcome = Outcome(seed, world.faults, world.schedulers)
    try:
        with _listening_to_logs(world.ledger):
            loop.run_until_complete(world.live())
    except Broken as error:
        outcome.failure = str(error)
    finally:
        outcome.steps, outcome.simulated_s = loop.steps, loop.time()
        outcome.digest, outcome.trace = world.digest, list(world.trace)
        _close(loop)
        asyncio.set_event_loop(None)
        shutil.rmtree(directory, ignore_errors=True)
    outcome.commits, outcome.starts, outcome.fences = world.ledger.commits, world.truth.starts, world.truth.fences
    outcome.terms = world.ledger.term
    outcome.tasks = len(world.ledger.tasks)
    outcome.lost = sum(a.status.value == "lost" for a in world.ledger.allocations.values())
    outcome.took_s = time.perf_counter() - began
    return outcome
