"""What is free and what is used, derived from live allocations: for nodes, pools, quota policies and projects."""

from __future__ import annotations

from dataclasses import dataclass, field

from crater_core.errors import NotFound
from crater_core.model.node import GpuDevice, Node, PoolKind
from crater_core.model.quota import Limits
from crater_core.model.resources import NOTHING, Amounts
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import TaskType
from crater_core.model.units import MILLI
from crater_core.scheduling.fairness import PARTS, Shares
from crater_core.scheduling.memory import memory_of
from crater_core.scheduling.quotas import applicable


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool gathered over its nodes. Amounts are those of its kind only: a gpu pool counts devices, and so on.

    `free` counts nodes that are ready and not cordoned, and well devices; `devices_free` are wholly free ones.
    """

    name: str
    kind: PoolKind
    nodes: tuple[str, ...]
    capacity: Amounts
    allocatable: Amounts
    free: Amounts
    devices: int = 0
    devices_free: int = 0
    strategy: str = ""


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """What live allocations hold under one policy."""

    used: Amounts = NOTHING
    by_user: dict[str, Amounts] = field(default_factory=lambda: {})


def device_use(snapshot: Snapshot, node_name: str) -> dict[str, tuple[int, int]]:
    """Device UUID to (compute in thousandths, memory in MiB) given out on one node."""
    used: dict[str, tuple[int, int]] = {}
    for allocation in snapshot.by_node.get(node_name, {}).values():
        for grant in allocation.grants:
            compute, memory = used.get(grant.uuid, (0, 0))
            used[grant.uuid] = (compute + grant.compute_milli, memory + grant.memory_mib)
    return used


def free_amounts(snapshot: Snapshot, node_name: str) -> Amounts:
    """Allocatable minus what is given out, whether or not the node takes new tasks. GPUs: well devices only."""
    node = snapshot.nodes.get(node_name)
    if node is None:
        raise NotFound(f"no node is called {node_name}", node=node_name)
    held: Amounts = sum((a.held for a in snapshot.by_node.get(node_name, {}).values() if not a.control), NOTHING)
    gpus = _free_on(snapshot, node, [device for device in node.devices if device.healthy])
    give = node.allocatable
    return Amounts(
        max(0, give.cpu_milli - held.cpu_milli),
        max(0, give.memory_bytes - held.memory_bytes),
        max(0, give.disk_bytes - held.disk_bytes),
        gpus.gpu_milli,
        gpus.gpu_memory_mib,
    )


def _free_on(snapshot: Snapshot, node: Node, devices: list[GpuDevice]) -> Amounts:
    used = device_use(snapshot, node.name)
    compute = sum(max(0, MILLI - used.get(device.uuid, (0, 0))[0]) * device.card_milli // MILLI for device in devices)
    memory = sum(max(0, device.allocatable_memory_mib - used.get(device.uuid, (0, 0))[1]) for device in devices)
    return Amounts(gpu_milli=compute, gpu_memory_mib=memory)


def pool_overview(snapshot: Snapshot) -> tuple[PoolView, ...]:
    """Every pool by name, over the nodes that give to it."""
    members: dict[tuple[str, PoolKind], list[Node]] = {}
    for _, node in sorted(snapshot.nodes.items()):
        for pool, kind in node.pools.items():
            members.setdefault((pool, kind), []).append(node)
    settings = snapshot.settings
    return tuple(
        _pool(snapshot, name, kind, nodes, settings.pool_strategies.get(name, settings.strategy))
        for (name, kind), nodes in sorted(members.items())
    )


def _pool(snapshot: Snapshot, name: str, kind: PoolKind, nodes: list[Node], strategy: str) -> PoolView:
    capacity, allocatable, free, devices, devices_free = NOTHING, NOTHING, NOTHING, 0, 0
    for node in nodes:
        if kind is not PoolKind.GPU:
            capacity += _only(kind, node.capacity)
            allocatable += _only(kind, node.allocatable)
            free += _only(kind, free_amounts(snapshot, node.name)) if node.schedulable else NOTHING
            continue
        mine = [device for device in node.devices if device.pool == name]
        well = [device for device in mine if device.healthy]
        used = device_use(snapshot, node.name)
        devices += len(mine)
        capacity += Amounts(
            gpu_milli=sum(device.card_milli for device in mine), gpu_memory_mib=sum(device.memory_mib for device in mine)
        )
        allocatable += Amounts(
            gpu_milli=sum(device.card_milli for device in well), gpu_memory_mib=sum(d.allocatable_memory_mib for d in well)
        )
        if node.schedulable:
            free += _free_on(snapshot, node, well)
            devices_free += sum(device.uuid not in used for device in well)
    return PoolView(name, kind, tuple(node.name for node in nodes), capacity, allocatable, free, devices, devices_free, strategy)


def _only(kind: PoolKind, amounts: Amounts) -> Amounts:
    match kind:
        case PoolKind.CPU:
            return Amounts(cpu_milli=amounts.cpu_milli)
        case PoolKind.MEMORY:
            return Amounts(memory_bytes=amounts.memory_bytes)
        case PoolKind.DISK:
            return Amounts(disk_bytes=amounts.disk_bytes)
        case PoolKind.GPU:
            return Amounts(gpu_milli=amounts.gpu_milli, gpu_memory_mib=amounts.gpu_memory_mib)


def quota_use(snapshot: Snapshot) -> dict[str, QuotaUse]:
    """Use of every policy, in all and by user. A task counts where `applicable` says it does; control tasks nowhere."""
    use = {name: QuotaUse() for name in sorted(snapshot.policies)}
    for allocation in snapshot.allocations.values():
        task = snapshot.tasks.get(allocation.task)
        if task is None or task.spec.type is TaskType.CONTROL:
            continue
        spec = task.spec
        for policy in applicable(snapshot.policies, spec.project, spec.quota_policy):
            known = use[policy.name]
            by_user = {**known.by_user, spec.user: known.by_user.get(spec.user, NOTHING) + allocation.held}
            use[policy.name] = QuotaUse(known.used + allocation.held, by_user)
    return use


def borrowed(used: Amounts, guarantee: Limits) -> Amounts:
    """What is used above a guarantee, of the resources that it names."""

    def above(used: int, guarantee: int | None) -> int:
        return 0 if guarantee is None else max(0, used - guarantee)

    return Amounts(
        above(used.cpu_milli, guarantee.cpu_milli),
        above(used.memory_bytes, guarantee.memory_bytes),
        above(used.disk_bytes, guarantee.disk_bytes),
        above(used.gpu_milli, guarantee.gpu_milli),
    )


@dataclass(frozen=True, slots=True)
class ProjectShare:
    """What decides a project's place among equals. `held_milli` and `average_milli` are the largest part of the cluster's GPUs,
    cores, memory or disk, in thousandths; `share_milli` is what is compared: their mean over the weight, the smaller first.
    """

    weight_milli: int
    held: Amounts
    average: Amounts
    held_milli: int
    average_milli: int
    share_milli: int


def project_shares(snapshot: Snapshot, now_ms: int) -> dict[str, ProjectShare]:
    """Every project that holds something or did lately, by name."""
    columns = memory_of(snapshot).columns
    shares = Shares(columns, columns.held_in_all, snapshot.settings, snapshot.past, now_ms)
    found: dict[str, ProjectShare] = {}
    for project in sorted(shares.projects):
        held, average = shares.held_by(project), shares.average_of(project)
        if any(held) or any(average):
            parts = (shares.part_of(held), shares.part_of(average), shares.of(project))
            in_milli = (part * MILLI // PARTS for part in parts)
            found[project] = ProjectShare(shares.weight_of(project), _amounts(held), _amounts([*average, 0]), *in_milli)
    return found


def _amounts(held: list[int]) -> Amounts:
    gpu, cpu, memory, disk, gpu_memory = held
    return Amounts(cpu, memory, disk, gpu, gpu_memory)
