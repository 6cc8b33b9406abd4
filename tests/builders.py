"""Small clusters for tests, told in few words: `a_node(gpus=4)`, `a_task(gpu=500)`, `a_snapshot(...)`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.node import ControlShare, GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.plan import Plan
from crater_core.model.quota import QuotaPolicy
from crater_core.model.resources import Amounts, GpuRequest, Request
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task, TaskSpec, TaskStatus, TaskType
from crater_core.model.units import GIB, MILLI

MIB_OF_A_CARD = 40_960


def a_node(
    name: str = "n1",
    *,
    cpu: int = 8,
    memory_gib: int = 64,
    disk_gib: int = 100,
    gpus: int = 0,
    sharing: SharingMode = SharingMode.EXCLUSIVE,
    gpu_type: str = "a100",
    model: str = "NVIDIA A100",
    gpu_memory_mib: int = MIB_OF_A_CARD,
    gpu_pool: str = "gpu-pool",
    overcommit_milli: int = MILLI,
    unwell: Iterable[int] = (),
    card_milli: int = MILLI,
    control: ControlShare | None = None,
    **more: Any,
) -> Node:
    """A ready node that gives `cpu` cores and so on to cpu-pool, memory-pool, disk-pool and, with GPUs, to `gpu_pool`."""
    amounts = Amounts(cpu * 1000, memory_gib * GIB, disk_gib * GIB)
    devices = tuple(
        GpuDevice(
            uuid=f"GPU-{name}-{index}",
            index=index,
            model=model,
            gpu_type=gpu_type,
            memory_mib=gpu_memory_mib,
            pool=gpu_pool,
            sharing=sharing,
            overcommit_milli=overcommit_milli,
            healthy=index not in set(unwell),
            card_milli=card_milli,
        )
        for index in range(gpus)
    )
    pools = {"cpu-pool": PoolKind.CPU, "memory-pool": PoolKind.MEMORY, "disk-pool": PoolKind.DISK}
    if gpus:
        pools[gpu_pool] = PoolKind.GPU
    fields: dict[str, Any] = {"pools": pools, "capacity": amounts, "allocatable": amounts, "devices": devices}
    return Node(name, **{**fields, "control": control or ControlShare(), **more})


def a_spec(
    name: str = "job",
    *,
    cpu: int = 1000,
    memory_gib: int = 1,
    disk_gib: int = 0,
    gpu: int = 0,
    gpu_memory_mib: int = 0,
    gpu_count: int = 1,
    gpu_types: tuple[str, ...] = (),
    ports: int = 0,
    **more: Any,
) -> TaskSpec:
    """`cpu` and `gpu` in thousandths: gpu=2000 asks for two whole devices, gpu=250 for a share of `gpu_count` devices."""
    request: GpuRequest | None = None
    if gpu >= MILLI:
        request = GpuRequest(gpu // MILLI, types=gpu_types)
    elif gpu or gpu_memory_mib:
        request = GpuRequest(gpu_count, gpu, gpu_memory_mib, exclusive=False, types=gpu_types)
    asked = Request(cpu, memory_gib * GIB, disk_gib * GIB, request, ports)
    more["type"] = TaskType(more.get("type", "batch"))
    return TaskSpec(**{"name": name, "command": ("true",), "request": asked, **more})


def a_task(id: str = "t1", *, at_ms: int = 0, not_before_ms: int = 0, foretold_ms: int | None = None, **spec: Any) -> Task:
    """A queued task; further words go to `a_spec`."""
    wanted = a_spec(**{"name": id, **spec})
    return Task(id, wanted, TaskStatus.QUEUED, at_ms, at_ms, not_before_ms=not_before_ms, foretold_ms=foretold_ms)


def a_snapshot(
    nodes: Iterable[Node] = (),
    tasks: Iterable[Task] = (),
    policies: Iterable[QuotaPolicy] = (),
    *,
    settings: Settings | None = None,
) -> Snapshot:
    snapshot = Snapshot(settings=settings or Settings())
    snapshot.advance([*nodes, *policies, *tasks])
    return snapshot


def allocations_of(snapshot: Snapshot, plan: Plan, now_ms: int = 0) -> list[Task | Allocation]:
    """What a plan would write: its placements as running allocations, and their tasks."""
    written: dict[str, Task | Allocation] = {}
    for placement in plan.placements:
        task = snapshot.tasks[placement.task]
        request = task.spec.request
        held = Amounts(
            request.cpu_milli,
            request.memory_bytes,
            request.disk_bytes,
            sum(grant.counts_milli for grant in placement.grants),
            sum(grant.memory_mib for grant in placement.grants),
        )
        id = f"a-{placement.task}-{task.attempt + 1}-{placement.member}"
        written[id] = Allocation(
            id,
            task.id,
            task.attempt + 1,
            placement.member,
            placement.node,
            1,
            held,
            placement.grants,
            placement.ports,
            control=task.spec.type is TaskType.CONTROL,
            status=AllocationStatus.RUNNING,
            assigned_at_ms=now_ms,
            started_at_ms=now_ms,
        )
        written[task.id] = replace(
            task, status=TaskStatus.RUNNING, attempt=task.attempt + 1, reason=None, allocation=id, started_at_ms=now_ms
        )
    return list(written.values())


def commit(snapshot: Snapshot, plan: Plan, now_ms: int = 0) -> None:
    """Make a plan true on the snapshot."""
    snapshot.advance(allocations_of(snapshot, plan, now_ms))


def end(snapshot: Snapshot, task: str) -> None:
    """The task has succeeded and left."""
    allocations = [replace(a, status=AllocationStatus.SUCCEEDED) for a in snapshot.by_task.get(task, {}).values()]
    snapshot.advance([*allocations, replace(snapshot.tasks[task], status=TaskStatus.SUCCEEDED)])
