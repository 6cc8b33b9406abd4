"""A simulated machine: its truth (which programs run), its spawner, and the real agent on top of them.

The agent, its session, link, records, adoption and reconciliation are the real ones. Simulated are what only a machine has:
processes, the spawner that is their parent, and probes over HTTP.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from simulation.loop import Clock, Process, VirtualLoop
from simulation.network import NOBODY, Network, Transport

from crater_agent import probe
from crater_agent.adopt import adopt
from crater_agent.agent import Agent
from crater_agent.environment import Host
from crater_agent.forked import write_record
from crater_agent.link import Link
from crater_agent.reconcile import LeaseState
from crater_agent.records import Kept, Record, Records, record_of
from crater_agent.runtime import Place
from crater_agent.runtimes import Runtimes
from crater_agent.session import Session
from crater_agent.workload import Workload
from crater_core.errors import RuntimeFailed
from crater_core.model.node import Node
from crater_core.wire.agents import AmountsDeclaration, DeviceDeclaration, Lease, NodeDeclaration

NEVER_MS = 10**9


@dataclass
class Program:
    """One workload as it truly is on its machine. Its command says how it behaves: sim DURATION_MS EXIT_CODE ENDS_ON_TERM_MS."""

    machine: Machine
    lease: Lease
    pid: int
    directory: str
    restartable: bool
    fence_grace_ms: int
    lives: bool = True
    fenced: bool = False
    timers: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        self._later(int(self.lease.command[1]), self.end, int(self.lease.command[2]), None)

    def terminate(self) -> None:
        if self.lives:
            self._later(int(self.lease.command[3]), self.end, None, 15)

    def kill(self) -> None:
        if self.lives:
            self._later(5, self.end, None, 9)

    def _later(self, ms: int, call: Callable[..., None], *args: Any) -> None:
        if ms < NEVER_MS:
            self.timers.append(self.machine.loop.call_later(ms / 1000, call, *args, context=NOBODY))

    def vanish(self) -> None:
        self.lives = False
        for timer in self.timers:
            timer.cancel()

    def end(self, code: int | None, signal: int | None) -> None:
        if self.lives:
            self.vanish()
            self.machine.truth.ended(self)
            self.machine.spawner.child_ended(self, code, signal)


class Spawner:
    """Stands for shim.py: the parent of programs, which outlives agents and fences when none of them renews the lease."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.process = Process(machine.loop, f"spawner@{machine.name}")
        self.children: dict[str, Program] = {}
        self.fence_at_ms: int | None = None

    def spawn(self, lease: Lease, record: Record, directory: str, fence_grace_ms: int) -> Program:
        machine = self.machine
        if record.restartable and self.fence_at_ms is not None and machine.loop.now_ms() >= self.fence_at_ms:
            raise RuntimeFailed("its lease has run out", again=1)
        program = Program(machine, lease, machine.new_pid(), directory, record.restartable, fence_grace_ms)
        write_record(directory, "started.json", {"pid": program.pid, "start_ticks": program.pid}, durably=False)
        self.children[lease.allocation] = program
        machine.programs[program.pid] = program
        machine.truth.started(program)
        program.begin()
        return program

    def child_ended(self, program: Program, code: int | None, signal: int | None) -> None:
        if not self.process.alive or self.children.pop(program.lease.allocation, None) is None:
            return  # An orphan of a spawner that is gone: nobody sees how it ended.
        ended = {"code": code, "signal": signal, "fenced": program.fenced, "cpu_ms": 1, "memory_peak_bytes": 1}
        with contextlib.suppress(OSError):
            write_record(program.directory, "exit.json", ended, durably=False)
        agent = self.machine.agent
        if agent is not None:
            self.machine.agent_process.soon(agent.on_exit, program.lease.allocation, ended)

    def renew(self, for_ms: int) -> None:
        loop = self.machine.loop
        self.fence_at_ms = loop.now_ms() + for_ms
        for grace_ms in sorted({0, *(program.fence_grace_ms for program in self.children.values())}):
            self.process.later(max(0, for_ms - grace_ms) / 1000, self._fence)

    def _fence(self) -> None:
        now_ms = self.machine.loop.now_ms()
        assert self.fence_at_ms is not None
        for program in list(self.children.values()):
            if program.restartable and now_ms >= self.fence_at_ms - program.fence_grace_ms:
                if not program.fenced:
                    program.fenced = True
                    self.machine.truth.fenced(program)
                    program.terminate()
                if now_ms >= self.fence_at_ms:
                    program.kill()


class SpawnerLine:
    """The agent's side of the spawner."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.children: dict[str, int] = {}

    async def connect(self) -> bool:
        machine = self._machine
        found = machine.spawner.process.alive
        if not found:
            machine.spawner = Spawner(machine)
        await machine.settles()
        self.children = {name: program.pid for name, program in machine.spawner.children.items()}
        return found

    def renew(self, for_ms: int) -> None:
        if self._machine.spawner.process.alive:
            self._machine.spawner.renew(for_ms)


class Runtime:
    """Implements the agent's `Runtime`, and the rest of what it wants of its process runtime."""

    name = "process"

    def __init__(self, machine: Machine, records: Records) -> None:
        self.machine, self.records = machine, records
        self.spawner = SpawnerLine(machine)
        self.scratch = SimpleNamespace(remove_old=lambda: None, keep=lambda record: None)
        host = Host(machine.name, "/usr/bin", "/root", "", {})
        self.place = Place(host, machine.directory, machine.boot_id)

    def record(self, lease: Lease, now_ms: int) -> Record:
        return record_of(lease, str(self.machine.directory / "scratch" / lease.allocation), "", self.place.boot_id, now_ms)

    async def start(self, lease: Lease, workload: Workload, lease_state: LeaseState) -> None:
        machine = self.machine
        self.records.begin(workload.record)
        directory = str(self.records.directory(lease.allocation))
        grace_ms = lease_state.fence_grace_ms(workload.record.grace_ms)
        await machine.settles()
        if not machine.spawner.process.alive:
            raise RuntimeFailed("the spawner is gone", again=1)
        if machine.rng.randrange(1000) < machine.start_failures:
            raise RuntimeFailed("could not fork", again=1)
        if lease.allocation in machine.spawner.children:
            raise RuntimeFailed("it runs already")
        program = machine.spawner.spawn(lease, workload.record, directory, grace_ms)
        await machine.settles()
        workload.pid, workload.start_ticks = program.pid, program.pid

    def _program(self, workload: Workload) -> Program | None:
        return self.machine.programs.get(workload.pid)

    def terminate(self, workload: Workload) -> None:
        if (program := self._program(workload)) is not None:
            self.machine.truth.asked_to_end(program, workload)
            program.terminate()

    def kill(self, workload: Workload) -> None:
        if (program := self._program(workload)) is not None:
            self.machine.truth.asked_to_end(program, workload)
            program.kill()

    def lives(self, workload: Workload) -> bool:
        program = self._program(workload)
        return program is not None and program.lives

    main_lives = lives

    def counters(self, workload: Workload) -> None:
        return None

    def disk_paths(self, workload: Workload) -> tuple[str, ...]:
        return ()

    def park(self) -> None:
        pass

    async def clean(self, record: Record) -> bool:
        return True

    async def adopt(self, kept: Sequence[Kept], silent_ms: int) -> list[Workload]:
        machine, children = self.machine, self.spawner.children
        found = adopt(self.records, kept, children, self.place.boot_id, machine.name, silent_ms, machine.alive)
        for workload in found:
            if workload.orphan and workload.pid and not workload.start_ticks:
                workload.start_ticks = workload.pid
        return found

    async def remove_strays(self, records: Iterable[Record]) -> list[str]:
        known = {record.allocation for record in records}
        strays = [p for p in self.machine.programs.values() if p.lives and p.lease.allocation not in known]
        for program in strays:
            program.kill()
        return [program.lease.allocation for program in strays]


class Watcher:
    """Measures nothing."""

    def sample(self, workloads: object, now_ms: int) -> None:
        pass

    async def sample_disks(self, workloads: object, now_ms: int) -> None:
        pass

    def last(self, workload: object, cpu_ms: int, memory_peak_bytes: int) -> None:
        pass


class Prober(probe.Prober):
    """A replica answers two seconds after its start."""

    machine: Machine

    async def _ask(self, url: str, timeout_ms: int) -> str:
        return "" if self.machine.rng.randrange(1000) < 950 else "no answer"


class Machine:
    """One host. `start_agent` after a boot; `crash` is a power cut, which may swallow what was not forced to the disk."""

    def __init__(
        self, loop: VirtualLoop, network: Network, rng: Random, truth: Any, node: Node, directory: Path, endpoints: Sequence[str]
    ) -> None:
        self.loop, self.network, self.rng, self.truth, self.node = loop, network, rng, truth, node
        self.name, self.directory = node.name, directory
        self.clock = Clock(loop, rng.choice([0.0, 0.001, -0.001]))
        self.programs: dict[int, Program] = {}
        self.start_failures = 0
        self.slow_s_max = 0.01
        self.boots = 0
        self.up = False
        self.agent: Agent | None = None
        self.agent_process = Process(loop, f"agent@{self.name}")
        self.agent_process.kill()
        self.spawner = Spawner(self)
        self.endpoints = tuple(rng.sample(endpoints, len(endpoints)))
        directory.mkdir(parents=True)

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def new_pid(self) -> int:
        return self.truth.new_pid()

    def alive(self, pid: int, start_ticks: int) -> bool:
        program = self.programs.get(pid)
        return program is not None and program.lives

    async def settles(self) -> None:
        """The kernel and the disk take a moment."""
        await self.loop.run_in_executor(None, lambda: None)

    def boot(self) -> None:
        self.boots += 1
        self.up = True
        self.clock.boot()
        self.network.dark.discard(self.name)
        self.spawner = Spawner(self)
        self.start_agent()

    def start_agent(self) -> None:
        if not self.up or self.agent_process.alive:
            return
        process = self.agent_process = Process(self.loop, f"agent@{self.name}")
        process.disk = lambda: self.rng.random() * self.slow_s_max
        self.agent = None
        process.run(self._serve())

    async def _serve(self) -> None:
        records = Records(self.directory)
        runtime: Any = Runtime(self, records)
        transport = Transport(self.network, self.name)
        link = Link(self.endpoints, None, self.name, transport, self._is_refused)
        workloads: dict[str, Workload] = {}
        session = Session(self._declaration(), link, runtime, workloads, self.clock, self.rng.random)
        watcher: Any = Watcher()
        agent = Agent(self.name, session, workloads, runtime, Runtimes(runtime), watcher, self.clock, 10**9)
        agent._prober = Prober(agent._health_changed, self.clock.monotonic_ms)
        agent._prober.machine = self  # type: ignore[attr-defined]
        await runtime.spawner.connect()
        self.agent = agent
        await agent.take_over()
        await agent.run()

    async def _is_refused(self, url: Any) -> bool:
        return self.network.refuses(self.name, url.host)

    def _declaration(self) -> NodeDeclaration:
        node = self.node
        amounts = AmountsDeclaration(
            cpu_milli=node.allocatable.cpu_milli,
            memory_bytes=node.allocatable.memory_bytes,
            disk_bytes=node.allocatable.disk_bytes,
        )
        return NodeDeclaration(
            pools=dict(node.pools),
            capacity=amounts,
            allocatable=amounts,
            devices=tuple(
                DeviceDeclaration(
                    uuid=d.uuid,
                    index=d.index,
                    model=d.model,
                    gpu_type=d.gpu_type,
                    memory_mib=d.memory_mib,
                    pool=d.pool,
                    sharing=d.sharing,
                )
                for d in node.devices
            ),
            boot_id=self.boot_id,
            agent_secret="x",
        )

    def stop_agent(self) -> None:
        """SIGKILL."""
        self.agent_process.kill()

    def stop_spawner(self) -> None:
        self.spawner.process.kill()
        self.spawner.children.clear()
        if self.agent is not None:
            self.agent_process.soon(self.agent.on_spawner_lost)

    def crash(self) -> None:
        self.up = False
        self.network.dark.add(self.name)
        self.agent_process.kill()
        self.spawner.process.kill()
        for program in self.programs.values():
            if program.lives:
                program.vanish()
                self.truth.ended(program)
        self.programs.clear()
        for directory in sorted((self.directory / "allocations").iterdir()):
            if self.rng.randrange(3) == 0:
                shutil.rmtree(directory)
            else:
                for file in sorted(directory.iterdir()):
                    if self.rng.randrange(3) == 0:
                        file.unlink()
