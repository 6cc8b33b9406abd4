"""A small cluster in one thread: applies inputs as the service does and checks every invariant after each step."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from crater_core.lifecycle import Changes, apply
from crater_core.lifecycle.inputs import (
    CancelAsked,
    Input,
    NodeHeard,
    NodeRegistered,
    NodeSilent,
    Planned,
    Report,
    ServiceDeployed,
    TaskSubmitted,
    Tick,
)
from crater_core.lifecycle.invariants import violations
from crater_core.model.allocation import Allocation, AllocationStatus, DeviceGrant, Placement
from crater_core.model.history import Event
from crater_core.model.node import GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.plan import Plan, Preemption
from crater_core.model.reason import Reason
from crater_core.model.resources import Amounts, GpuRequest, Request
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import HealthCheck, RetryPolicy, Task, TaskSpec, TaskType
from crater_core.model.units import GIB
from crater_core.model.usage import UsageRecord
from crater_core.scheduling import schedule


def a_node(name: str = "n1", cpu: int = 8, gpus: int = 0, sharing: SharingMode = SharingMode.TIME_SLICE) -> Node:
    amounts = Amounts(cpu * 1000, 32 * GIB, 100 * GIB)
    devices = tuple(GpuDevice(f"GPU-{name}-{i}", i, "A100", "a100", 40_000, "gpu-pool", sharing) for i in range(gpus))
    pools = {"cpu-pool": PoolKind.CPU, "memory-pool": PoolKind.MEMORY}
    if gpus:
        pools["gpu-pool"] = PoolKind.GPU
    return Node(name, pools=pools, capacity=amounts, allocatable=amounts, devices=devices)


def a_spec(
    name: str = "job", cpu_milli: int = 1000, gpu_milli: int = 0, retry: RetryPolicy | None = None, **more: object
) -> TaskSpec:
    gpu = GpuRequest(1, gpu_milli, 0, exclusive=gpu_milli == 1000) if gpu_milli else None
    request = Request(cpu_milli, GIB, 0, gpu)
    return TaskSpec(name, command=("true",), request=request, retry=retry or RetryPolicy(), **more)  # type: ignore[arg-type]


def a_service(name: str = "web", **more: object) -> TaskSpec:
    request = Request(1000, GIB, 0, None, ports=1)
    retry = RetryPolicy(on_node_loss=False)
    spec = TaskSpec(
        name, TaskType.INFERENCE, command=("serve",), request=request, retry=retry, service=name, health=HealthCheck()
    )
    return replace(spec, **more)  # type: ignore[arg-type]


class World:
    """Holds the snapshot and everything that was ever written."""

    def __init__(self, *nodes: Node) -> None:
        self.snapshot = Snapshot()
        self.now_ms = 1_000_000
        self.events: list[Event] = []
        self.usage: list[UsageRecord] = []
        self.ended: dict[str, Task] = {}
        self.ended_allocations: dict[str, Allocation] = {}
        self._ids = count(1)
        for node in nodes:
            self.do(NodeRegistered(node))

    def do(self, happened: Input) -> Changes:
        changes = apply(self.snapshot, happened, self.now_ms)
        again = apply(self.snapshot, happened, self.now_ms)
        assert changes == again, "apply must not depend on anything but its arguments"
        self.snapshot.advance(changes.puts, changes.removed)
        self.snapshot.revision += bool(changes)
        self.events += changes.events
        self.usage += changes.usage
        for entity in changes.puts:
            if isinstance(entity, Task) and entity.status.ended:
                assert entity.id not in self.ended, f"{entity.id} ended twice"
                self.ended[entity.id] = entity
            if isinstance(entity, Allocation) and entity.status.ended:
                assert entity.id not in self.ended_allocations, f"{entity.id} ended twice"
                self.ended_allocations[entity.id] = entity
        assert violations(self.snapshot) == []
        return changes

    def wait(self, ms: int) -> None:
        self.now_ms += ms

    def submit(self, spec: TaskSpec) -> str:
        task_id = f"t{next(self._ids)}"
        self.do(TaskSubmitted(task_id, spec))
        return task_id

    def place(self, task_id: str, *nodes: str, grants: tuple[DeviceGrant, ...] = (), ports: tuple[int, ...] = ()) -> str:
        """Place each member on a node; answers the first allocation's id. A gang has a port more, to meet at."""
        meeting = self.task(task_id).spec.members > 1
        placements = tuple(
            Placement(task_id, member, node, grants, (*ports, 30_000 + member) if meeting else ports)
            for member, node in enumerate(nodes)
        )
        ids = tuple(f"a{next(self._ids)}" for _ in nodes)
        self.do(Planned(Plan(self.snapshot.revision, placements), ids))
        return ids[0]

    def cycle(self) -> Plan:
        """What the scheduler decides now, made true."""
        plan = schedule(self.snapshot, self.now_ms)
        self.do(Planned(plan, tuple(f"a{next(self._ids)}" for _ in plan.placements)))
        return plan

    def preempt(self, victim: str, preemptor: str) -> None:
        self.do(Planned(Plan(self.snapshot.revision, preemptions=(Preemption(victim, preemptor),)), ()))

    def run(self, task_id: str, node: str = "n1", **more: object) -> str:
        allocation = self.place(task_id, node, **more)  # type: ignore[arg-type]
        self.report(allocation, AllocationStatus.RUNNING)
        return allocation

    def report(
        self,
        allocation_id: str,
        status: AllocationStatus,
        reason: Reason | None = None,
        exit_code: int | None = None,
        *,
        ready: bool = False,
        token: int | None = None,
    ) -> Changes:
        known = self.snapshot.allocations.get(allocation_id) or self.ended_allocations[allocation_id]
        token = known.token if token is None else token
        return self.do(Report(known.node, allocation_id, token, status, self.now_ms, reason, exit_code, None, ready))

    def end(self, task_id: str, status: AllocationStatus, exit_code: int | None = None) -> None:
        """Every member of a placed task ends so."""
        for allocation in list(self.snapshot.by_task[task_id].values()):
            self.report(allocation.id, status, exit_code=exit_code)

    def cancel(self, task_id: str, by: str = "ann") -> Changes:
        return self.do(CancelAsked(task_id, by))

    def lose(self, node: str, *, forget: bool = False) -> Changes:
        return self.do(NodeSilent(node, 30_000, forget))

    def hear(self, node: str) -> Changes:
        return self.do(NodeHeard(node))

    def deploy(self, name: str = "web", replicas: int = 2, **more: object) -> Changes:
        return self.do(ServiceDeployed(name, a_service(name, **more), replicas))

    def tick(self) -> Changes:
        return self.do(Tick(tuple(f"t{next(self._ids)}" for _ in range(20))))

    def task(self, task_id: str) -> Task:
        return self.snapshot.tasks.get(task_id) or self.ended[task_id]

    def replicas(self, name: str = "web") -> list[Task]:
        return [self.snapshot.tasks[task_id] for task_id in sorted(self.snapshot.by_service.get(name, ()))]

    def story(self, task_id: str) -> list[str]:
        return [event.what for event in self.events if event.id == task_id]
