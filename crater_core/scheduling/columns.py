"""Nodes and devices as columns of whole numbers, kept equal to a snapshot by re-reading only the nodes that changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.node import GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.prices import Make
from crater_core.model.reason import TAKEN_FOR_ANOTHER
from crater_core.model.snapshot import Snapshot
from crater_core.model.units import MILLI
from crater_core.scheduling.endings import foretold_end

IntArray = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.bool_)
BoolArray = NDArray[np.bool_]

CPU, MEMORY, DISK, PORTS, CONTROL_SLOTS, CONTROL_MEMORY = range(6)
WIDTH = 6
NOTHING_RUNS = 1000
MORE_THAN_A_SLICE = 1 << 60
"""In MiB: what a card counts for beside slices."""
NOBODY = -1
"""No user holds the device under MPS."""

Bucket = tuple[str, str, str | None]
"""Who holds something: project, user, and the quota policy named by the task."""
Held = list[int]
"""gpu, cpu, memory, disk, GPU memory; units as in `Amounts`."""


class DeviceKind:
    """Devices that a shape cannot tell apart, but for what is free on them."""

    __slots__ = ("device", "pools")

    def __init__(self, device: GpuDevice, pools: dict[str, PoolKind]) -> None:
        self.device = device
        self.pools = pools


class Columns:
    """Row i is the i-th node by name; device columns have one place for each device of the largest node.

    `kind` is -1 where there is no device or an unwell one, which has nothing free; `profile` is -1 where the node takes
    nothing new.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.row_of: dict[str, int] = {}
        self.nodes: list[Node] = []
        self.devices: list[list[GpuDevice]] = []
        self.whole_order: list[list[int]] = []
        """Per row, its slots in the order in which whole devices are given out."""
        self.kinds: list[DeviceKind] = []
        self.profiles: list[Node] = []
        """One node of each profile: same labels, pools and runtimes."""
        self.makes: dict[Make, int] = {}
        """Every make seen, with its number in the column `make`."""
        self._kind_ids: dict[tuple[object, ...], int] = {}
        self._profile_ids: dict[tuple[object, ...], int] = {}
        self.users: dict[str, int] = {}
        self.mps = False
        """Whether any device serves one user at a time."""
        self.ports_used: list[set[int]] = []
        self.leaving: dict[int, dict[str, int]] = {}
        """Per row, the tasks for which allocations are being stopped there, and how many."""
        self.stopping: set[int] = set()
        """Rows on which something is being stopped, for whatever reason."""
        self.held: dict[str, dict[Bucket, Held]] = {}
        """Per node name, what each bucket holds there: the source of quota use."""
        self.held_in_all: dict[Bucket, Held] = {}
        self.moment = 0
        """Moves with every change of a row: a score column refreshes only what has changed since it last looked."""
        self.generation = 0
        """Moves when rows are renumbered: everything kept per row is then void."""
        self.declarations = 0
        """Moves when a node joins, leaves, or says something else of itself."""
        self._seen = 0
        self._stale: set[int] = set()
        self.largest_cpu: int = 1
        self.largest_gpu: int = 1
        """Of any node, in thousandths: what scores are measured against."""
        self._reset(0, 1)

    def _reset(self, count: int, width: int) -> None:
        # By column in memory: a few rows of one column are read again and again.
        self._changed_at: IntArray = np.zeros(count, np.int64)
        self.free: IntArray = np.zeros((count, WIDTH), np.int64, order="F")
        self.total: IntArray = np.zeros((count, WIDTH), np.int64, order="F")
        self.room: IntArray = np.zeros((2, width, count), np.int64)
        """What devices have free: compute in thousandths and memory in MiB, by slot, by row."""
        self.compute: IntArray = self.room[0].T
        self.gpu_memory: IntArray = self.room[1].T
        self.user: IntArray = np.full((count, width), NOBODY, np.int64, order="F")
        self.kind: IntArray = np.full((count, width), -1, np.int64, order="F")
        self.profile: IntArray = np.full(count, -1, np.int64)
        self.make: IntArray = np.zeros(count, np.int64)
        self.gpus: IntArray = np.zeros(count, np.int64)
        """Thousandths of all well devices of the node."""
        self.compute_free: IntArray = np.zeros(count, np.int64)
        """Thousandths that are free on the node's well devices together."""
        self.newest: IntArray = np.zeros(count, np.int64)
        """When the youngest allocation of the node was made."""
        self.lowest: IntArray = np.zeros(count, np.int64)
        """The lowest priority that runs there; above 100 when nothing does."""
        self.limited: IntArray = np.zeros(count, np.int64)
        """How many allocations of the node have an end that can be foretold."""

    # --- keeping up with the snapshot

    def sync(self, snapshot: Snapshot) -> None:
        changed = self._changed_since(snapshot)
        if any(name in snapshot.nodes and self._must_renumber(snapshot, name) for name in changed) or any(
            name in self.row_of and name not in snapshot.nodes for name in changed
        ):
            self._renumber(snapshot)
        else:
            rows = {self.row_of[name] for name in changed if name in self.row_of} | self._stale
            for row in rows:
                self._read(snapshot, row)
        for name in changed:
            if name not in self.row_of:
                self._hold(name, self._sum_held(snapshot, snapshot.by_node.get(name, {}).values()))
        self._stale.clear()
        if changed:
            self._measure_largest()

    def _measure_largest(self) -> None:
        cpu, gpu = max(1, int(self.total[:, CPU].max(initial=0))), max(1, int(self.gpus.max(initial=0)))
        if (cpu, gpu) != (self.largest_cpu, self.largest_gpu):
            self.largest_cpu, self.largest_gpu = cpu, gpu
            self.void()

    def void(self) -> None:
        """Everything kept per row, such as scores, is to be made anew."""
        self.generation += 1

    def touch(self, row: int) -> None:
        """The row no longer shows the snapshot: it is read again before the next decision."""
        self._stale.add(row)
        self._mark(row)

    def _mark(self, row: int) -> None:
        self.moment += 1
        self._changed_at[row] = self.moment

    def changed_since(self, moment: int) -> IntArray:
        """The rows that have changed after that moment."""
        return (self._changed_at > moment).nonzero()[0]

    def _changed_since(self, snapshot: Snapshot) -> list[str]:
        changed: list[str] = []
        for name, counter in reversed(snapshot.node_changes.items()):
            if counter <= self._seen:
                break
            changed.append(name)
        if changed:
            self._seen = snapshot.node_changes[changed[0]]
        return changed

    def _must_renumber(self, snapshot: Snapshot, name: str) -> bool:
        return name not in self.row_of or len(snapshot.nodes[name].devices) > self.compute.shape[1]

    def _renumber(self, snapshot: Snapshot) -> None:
        self.names = sorted(snapshot.nodes)
        self.row_of = {name: row for row, name in enumerate(self.names)}
        self.nodes = [snapshot.nodes[name] for name in self.names]
        self.devices = [[] for _ in self.names]
        self.whole_order = [[] for _ in self.names]
        self.ports_used = [set() for _ in self.names]
        self.leaving = {}
        self.stopping = set()
        self._reset(len(self.names), max((len(node.devices) for node in self.nodes), default=1) or 1)
        self.void()
        self.declarations += 1
        for name in [name for name in self.held if name not in self.row_of]:
            self._hold(name, self._sum_held(snapshot, snapshot.by_node.get(name, {}).values()))
        for row in range(len(self.names)):
            self._read(snapshot, row)

    def _read(self, snapshot: Snapshot, row: int) -> None:
        name = self.names[row]
        node = snapshot.nodes[name]
        allocations = snapshot.by_node.get(name, {}).values()
        if self.nodes[row] is not node:
            self.declarations += 1
        self.nodes[row] = node
        self._read_declared(row, node)
        self._read_taken(snapshot, row, node, allocations)
        self._hold(name, self._sum_held(snapshot, allocations))
        self._mark(row)

    def _read_declared(self, row: int, node: Node) -> None:
        give, control = node.allocatable, node.control
        self.total[row] = (
            give.cpu_milli,
            give.memory_bytes,
            give.disk_bytes,
            node.port_count,
            control.slots,
            control.memory_bytes,
        )
        devices = sorted(node.devices, key=lambda device: (device.index, device.uuid))
        self.devices[row] = devices
        self.whole_order[row] = sorted(range(len(devices)), key=lambda slot: _order_of_whole(devices[slot]))
        self.profile[row] = self._profile_id(node) if node.schedulable else -1
        self.gpus[row] = MILLI * sum(device.healthy for device in devices)
        self.make[row] = self.makes.setdefault(Make.of(node), len(self.makes))
        self.kind[row] = -1
        for slot, device in enumerate(devices):
            if device.healthy:
                self.kind[row, slot] = self._kind_id(device, node)

    def _read_taken(self, snapshot: Snapshot, row: int, node: Node, allocations: Iterable[Allocation]) -> None:
        free = self.total[row].tolist()
        devices = self.devices[row]
        slots = {device.uuid: slot for slot, device in enumerate(devices)}
        compute = [MILLI] * len(devices)
        memory = [device.allocatable_memory_mib for device in devices]
        user = [NOBODY] * len(devices)
        ports: set[int] = set()
        newest, limited, lowest = 0, 0, NOTHING_RUNS
        self.leaving.pop(row, None)
        self.stopping.discard(row)
        for allocation in allocations:
            held = allocation.held
            limited += foretold_end(snapshot, allocation) is not None
            if allocation.status is AllocationStatus.STOPPING:
                self.stopping.add(row)
            preemptor = stopped_for(allocation)
            if preemptor is not None:
                leaving = self.leaving.setdefault(row, {})
                leaving[preemptor] = leaving.get(preemptor, 0) + 1
            ports.update(allocation.ports)
            if allocation.control:
                free[CONTROL_SLOTS] -= 1
                free[CONTROL_MEMORY] -= held.memory_bytes
                continue
            newest = max(newest, allocation.assigned_at_ms)
            task = snapshot.tasks.get(allocation.task)
            lowest = min(lowest, task.spec.priority if task else NOTHING_RUNS)
            free[CPU] -= held.cpu_milli
            free[MEMORY] -= held.memory_bytes
            free[DISK] -= held.disk_bytes
            for grant in allocation.grants:
                slot = slots.get(grant.uuid)
                if slot is None:
                    continue
                compute[slot] -= grant.compute_milli
                memory[slot] -= grant.memory_mib
                if devices[slot].sharing is SharingMode.MPS:
                    user[slot] = self.user_id(task.spec.user if task else "")
        free[PORTS] -= len(ports)
        self.ports_used[row] = ports
        self.newest[row], self.limited[row], self.lowest[row] = newest, limited, lowest
        self.free[row] = free
        width = len(devices)
        self.compute[row], self.gpu_memory[row], self.user[row] = 0, 0, NOBODY
        self.compute[row, :width] = [max(0, free) * device.healthy for free, device in zip(compute, devices, strict=True)]
        self.gpu_memory[row, :width] = memory
        self.user[row, :width] = user
        self.compute_free[row] = self.compute[row].sum()

    def user_id(self, user: str) -> int:
        return self.users.setdefault(user, len(self.users))

    def _profile_id(self, node: Node) -> int:
        key = (frozenset(node.labels.items()), frozenset(node.pools.items()), node.runtimes)
        found = self._profile_ids.get(key)
        if found is None:
            found = self._profile_ids[key] = len(self.profiles)
            self.profiles.append(node)
        return found

    def _kind_id(self, device: GpuDevice, node: Node) -> int:
        gpu_pools = frozenset(pool for pool, kind in node.pools.items() if kind is PoolKind.GPU)
        key = (
            device.gpu_type,
            device.model,
            device.memory_mib,
            device.pool,
            device.sharing,
            device.overcommit_milli,
            device.card_milli,
            gpu_pools,
        )
        found = self._kind_ids.get(key)
        if found is None:
            found = self._kind_ids[key] = len(self.kinds)
            self.kinds.append(DeviceKind(device, dict(node.pools)))
            self.mps |= device.sharing is SharingMode.MPS
        return found

    # --- who holds what

    def _sum_held(self, snapshot: Snapshot, allocations: Iterable[Allocation]) -> dict[Bucket, Held]:
        held: dict[Bucket, Held] = defaultdict(lambda: [0] * 5)
        for allocation in allocations:
            task = snapshot.tasks.get(allocation.task)
            if allocation.control or task is None:
                continue
            add(held[task.spec.project, task.spec.user, task.spec.quota_policy], vector(allocation))
        return held

    def _hold(self, name: str, held: dict[Bucket, Held]) -> None:
        before = self.held.pop(name, None)
        if held:
            self.held[name] = held
        if before == held:
            return
        for bucket, amounts in held.items():
            add(self.held_in_all.setdefault(bucket, [0] * 5), amounts)
        for bucket, amounts in (before or {}).items():
            add(self.held_in_all[bucket], amounts, -1)
            if not any(self.held_in_all[bucket]):
                del self.held_in_all[bucket]


def _order_of_whole(device: GpuDevice) -> tuple[int, bool]:
    """Smallest slices, then cards that cannot be shared, so that others stay for shares."""
    size = device.memory_mib if device.sharing is SharingMode.MIG else MORE_THAN_A_SLICE
    return size, device.sharing is not SharingMode.EXCLUSIVE


def stopped_for(allocation: Allocation) -> str | None:
    """The task to which an allocation that is being stopped gives its room."""
    reason = allocation.reason
    if allocation.status is not AllocationStatus.STOPPING or reason is None or reason.code not in TAKEN_FOR_ANOTHER:
        return None
    return str(reason.facts.get("by", ""))


def plain(rows: IntArray) -> IntArray:
    """The rows; a single one, as is usual, as a number. What is worked out for it is then numbers too, in a fifth of the time."""
    return rows if len(rows) != 1 else rows[0]


def pick(column: NDArray[Number], rows: IntArray) -> NDArray[Number]:
    """Some rows of a column with a place for each device: as `column[rows]`, in a quarter of the time."""
    return column.T.take(rows, 1).T


def add(total: Held, amounts: Held, sign: int = 1) -> None:
    for place, amount in enumerate(amounts):
        total[place] += sign * amount


def vector(allocation: Allocation) -> Held:
    held = allocation.held
    return [held.gpu_milli, held.cpu_milli, held.memory_bytes, held.disk_bytes, held.gpu_memory_mib]
