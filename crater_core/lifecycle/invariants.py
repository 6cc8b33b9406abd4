"""What must hold after every step, as a list of the sentences that do not."""

from __future__ import annotations

from collections import defaultdict

from crater_core.model.after import open_dependencies
from crater_core.model.allocation import AllocationStatus
from crater_core.model.node import SharingMode
from crater_core.model.resources import NOTHING, Amounts
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import TaskStatus
from crater_core.model.units import MILLI


def violations(snapshot: Snapshot) -> list[str]:
    """Empty when all is well."""
    return [*_nodes(snapshot), *_devices(snapshot), *_tasks(snapshot)]


def _nodes(snapshot: Snapshot) -> list[str]:
    found: list[str] = []
    for name, allocations in snapshot.by_node.items():
        node = snapshot.nodes.get(name)
        if node is None:
            found.append(f"node {name} holds {len(allocations)} allocations and does not exist")
            continue
        held: Amounts = sum((a.held for a in allocations.values() if not a.control), NOTHING)
        for field in ("cpu_milli", "memory_bytes", "disk_bytes"):
            if getattr(held, field) > getattr(node.allocatable, field):
                found.append(f"node {name}: {field} {getattr(held, field)} held, {getattr(node.allocatable, field)} allocatable")
        ports = [port for a in allocations.values() for port in a.ports]
        if len(ports) != len(set(ports)):
            found.append(f"node {name}: a port is given twice: {sorted(ports)}")
        if sum(a.control for a in allocations.values()) > node.control.slots:
            found.append(f"node {name}: more control tasks than slots")
    return found


def _devices(snapshot: Snapshot) -> list[str]:
    found: list[str] = []
    compute: dict[str, int] = defaultdict(int)
    memory: dict[str, int] = defaultdict(int)
    for allocation in snapshot.allocations.values():
        for grant in allocation.grants:
            compute[grant.uuid] += grant.compute_milli
            memory[grant.uuid] += grant.memory_mib
    devices = {device.uuid: device for node in snapshot.nodes.values() for device in node.devices}
    for uuid, milli in compute.items():
        device = devices.get(uuid)
        if device is None:
            continue  # A node may come back with fewer devices than its running work still holds.
        if milli > MILLI:
            found.append(f"device {uuid}: {milli} thousandths of compute held")
        bound = device.memory_mib if device.sharing is SharingMode.EXCLUSIVE else device.allocatable_memory_mib
        if memory[uuid] > bound:
            found.append(f"device {uuid}: {memory[uuid]} MiB held, {bound} allocatable")
    return found


def _tasks(snapshot: Snapshot) -> list[str]:
    found: list[str] = []
    for task in snapshot.tasks.values():
        live = snapshot.by_task.get(task.id, {})
        if task.status is TaskStatus.QUEUED and live:
            found.append(f"task {task.id} is queued and holds {len(live)} allocations")
        if task.status in (TaskStatus.ALLOCATED, TaskStatus.RUNNING) and not live:
            found.append(f"task {task.id} is {task.status} without an allocation")
        if live and (left := open_dependencies(snapshot, task.spec)):
            found.append(f"task {task.id} runs before {left} have ended")
        if len({a.attempt for a in live.values()}) > 1:
            found.append(f"task {task.id} runs in two attempts at once")
    for name, placed in snapshot.placed_of_array.items():
        array = snapshot.tasks[next(iter(placed))].spec.array
        if array is not None and array.running_max is not None and len(placed) > array.running_max:
            found.append(f"array {name}: {len(placed)} run at once, {array.running_max} may")
    for allocation in snapshot.allocations.values():
        if allocation.task not in snapshot.tasks:
            found.append(f"allocation {allocation.id} belongs to no live task")
        if allocation.status is AllocationStatus.RUNNING and allocation.started_at_ms is None:
            found.append(f"allocation {allocation.id} runs without a start")
    return found
