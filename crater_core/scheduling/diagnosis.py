"""Why nothing fits: for the cluster as a whole, the reason that helps a person most; for one node, the first thing amiss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from crater_core.model.node import GpuDevice, Node, NodeStatus
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling.columns import CONTROL_MEMORY, CONTROL_SLOTS, CPU, DISK, MEMORY, PORTS, BoolArray, IntArray, pick
from crater_core.scheduling.fits import TOO_MUCH, Fits, profile_fits
from crater_core.scheduling.quotas import listed
from crater_core.scheduling.shapes import Shape, only_by_mps

_C = ReasonCode


def why_nothing_fits(snapshot: Snapshot, fits: Fits) -> Reason:
    """For a shape that fits no node now: no node at all, none of the kind, fragmented, or simply busy."""
    columns, shape = fits.columns, fits.shape
    ready = np.flatnonzero(columns.profile >= 0)
    if not len(ready):
        return Reason.of(_C.NO_NODE_READY, nodes=len(snapshot.nodes))
    eligible = ready[fits.profile_ok[columns.profile[ready]]]
    if not len(eligible):
        return _none_of_the_kind(shape, [columns.profiles[profile] for profile in np.unique(columns.profile[ready]).tolist()])
    if shape.gpu is not None:
        usable = fits.device_compute[columns.kind[eligible]] < TOO_MUCH
        if not usable.any():
            return _no_such_device(fits, eligible)
        eligible = eligible[usable.any(1)]
    if shape.control:
        return Reason.of(_C.NO_CONTROL_SLOT, slots=int(columns.total[eligible, CONTROL_SLOTS].sum()))
    return _short(fits, eligible)


def _none_of_the_kind(shape: Shape, nodes: list[Node]) -> Reason:
    labels, pools = shape.labels, shape.pools
    nodes = [node for node in nodes if all(node.labels.get(key) == value for key, value in labels)]
    if not nodes:
        return Reason.of(_C.LABELS_MISMATCH, labels=_shown(shape))
    if not any(shape.runtime in node.runtimes for node in nodes):
        return Reason.of(_C.RUNTIME_MISSING, runtime=shape.runtime)
    nodes = [node for node in nodes if shape.runtime in node.runtimes]
    missing = [pool for pool in pools if not any(pool in node.pools for node in nodes)]
    return Reason.of(_C.POOL_MISSING, pool=missing[0] if missing else " and ".join(pools))


def _no_such_device(fits: Fits, eligible: IntArray) -> Reason:
    columns, gpu = fits.columns, fits.shape.gpu
    assert gpu is not None, "asked only for GPU shapes"
    rows: list[int] = eligible.tolist()
    by_mps = sum(only_by_mps(fits.shape, one, dict(columns.nodes[row].pools)) for row in rows for one in columns.devices[row])
    if by_mps:
        return Reason.of(_C.MPS_ONE_GPU, count=gpu.count, devices=by_mps)
    return none_of_the_type(gpu, [device for row in rows for device in columns.devices[row] if device.healthy])


def none_of_the_type(gpu: GpuRequest, devices: list[GpuDevice]) -> Reason:
    """What is wanted, and what there is instead."""
    what = " or ".join(gpu.types) or ("any" if gpu.exclusive else "any that can be shared and is large enough")
    if gpu.mig_profile is not None:
        what = f"MIG slice {gpu.mig_profile}" + (f" of {what}" if gpu.types else "")
    with_mode = not gpu.exclusive or not gpu.types
    return Reason.of(_C.GPU_TYPE_MISSING, types=what, present=listed({_kind(device, with_mode) for device in devices}))


def _kind(device: GpuDevice, with_mode: bool) -> str:
    if device.mig_profile is not None:
        return f"{device.gpu_type} {device.mig_profile} (mig)"
    return f"{device.gpu_type} ({device.sharing.value})" if with_mode else device.gpu_type


@dataclass(frozen=True, slots=True)
class _Resource:
    """One thing asked for: how much of it each eligible node could give now, and how much is free in all."""

    name: str
    wanted: int
    usable: IntArray
    free: int


def _short(fits: Fits, rows: IntArray) -> Reason:
    resources = _resources(fits, rows)
    for resource in resources:
        if resource.free < resource.wanted:
            return Reason.of(_C.NO_ROOM, resource=resource.name, wanted=resource.wanted, free=resource.free)
    enough = [resource.usable >= resource.wanted for resource in resources]
    if _only_another_user(fits, rows, resources):
        return Reason.of(_C.MPS_USER)
    place = "device" if fits.shape.shares and fits.count == 1 else "node"
    for index, resource in enumerate(resources):
        others: BoolArray = np.ones(len(rows), np.bool_)
        for other, there in enumerate(enough):
            if other != index:
                others &= there
        best = int(resource.usable[others].max(initial=-1))
        if 0 <= best < resource.wanted:
            return _fragmented(resource, best, place if resource.name == "gpu" else "node")
    # No node lacks one thing only: name the one that is scarcest everywhere.
    worst = min(resources, key=lambda resource: int(resource.usable.max(initial=0)) * 1000 // max(1, resource.wanted))
    return _fragmented(worst, min(int(worst.usable.max(initial=0)), worst.wanted - 1), "node")


def _only_another_user(fits: Fits, rows: IntArray, resources: list[_Resource]) -> bool:
    """Whether some node would fit if its MPS devices served this task's user."""
    if fits.shape.user is None:
        return False
    enough = fits.devices_with_room(rows).sum(1) >= fits.count
    for resource in resources:
        if not resource.name.startswith("gpu"):
            enough &= resource.usable >= resource.wanted
    return bool(enough.any())


def _fragmented(resource: _Resource, best: int, place: str) -> Reason:
    facts: dict[str, int | str] = {"wanted": resource.wanted, "free": resource.free, "best": best, "place": place}
    return Reason(_C.FRAGMENTED, {"resource": resource.name, **facts})


def _resources(fits: Fits, rows: IntArray) -> list[_Resource]:
    columns, request = fits.columns, fits.shape.request
    found: list[_Resource] = []
    if request.gpu is not None:
        found.append(_gpu(fits, rows))
    for name, column, wanted in (
        ("cpu", CPU, request.cpu_milli),
        ("memory", MEMORY, request.memory_bytes),
        ("disk", DISK, request.disk_bytes),
        ("ports", PORTS, request.ports),
    ):
        if wanted:
            free = columns.free[rows, column]
            found.append(_Resource(name, wanted, free, int(np.maximum(free, 0).sum())))
    return found


def _gpu(fits: Fits, rows: IntArray) -> _Resource:
    """Compute in thousandths; a share that is stopped by memory alone is told in memory."""
    columns, gpu = fits.columns, fits.shape.gpu
    assert gpu is not None, "asked only for GPU shapes"
    kind = pick(columns.kind, rows)
    allowed = fits.device_compute[kind] < TOO_MUCH
    fit = fits.fitting_devices(rows)
    compute = np.where(allowed, pick(columns.compute, rows), 0)
    memory = np.where(allowed, pick(columns.gpu_memory, rows), 0)
    need_compute = int(fits.device_compute[kind][allowed].min())
    if gpu.exclusive:
        wanted = gpu.count * need_compute
        return _Resource("gpu", wanted, fit.sum(1) * need_compute, int(compute.sum()))
    enough = ((compute >= fits.device_compute[kind]) & allowed).sum(1)
    if gpu.memory_mib and (enough >= gpu.count).any():
        largest = np.sort(memory, 1)[:, -gpu.count :].min(1) * gpu.count if memory.shape[1] >= gpu.count else memory.sum(1)
        usable = np.where(fit.sum(1) >= gpu.count, gpu.count * gpu.memory_mib, largest)
        return _Resource("gpu_memory", gpu.count * gpu.memory_mib, usable, int(memory.sum()))
    wanted = gpu.count * need_compute
    usable = np.where(fit.sum(1) >= gpu.count, wanted, np.minimum(compute.max(1), wanted - 1))
    return _Resource("gpu", wanted, usable, int(compute.sum()))


@dataclass(frozen=True, slots=True)
class _Devices:
    """Of one node: devices that the shape may use, those with enough compute, also with enough memory, also of the right user;
    what one share takes there; and the most memory that is free on one of them.
    """

    allowed: int
    with_compute: int
    with_memory: int
    fit: int
    compute: int
    memory: int
    memory_free: int


class Rejections:
    """The first thing that keeps the shape off each node."""

    def __init__(self, fits: Fits, now_ms: int) -> None:
        self._fits = fits
        self._now_ms = now_ms
        self._free: list[list[int]] = fits.columns.free.tolist()
        self._devices = _devices_of_all(fits) if fits.shape.gpu is not None else []

    def of(self, row: int) -> Reason:
        fits, shape, node = self._fits, self._fits.shape, self._fits.columns.nodes[row]
        if node.status is NodeStatus.LOST:
            return Reason.of(_C.NODE_LOST, node=node.name, silent_ms=max(0, self._now_ms - node.heartbeat_at_ms))
        if node.drain is not None:
            return Reason.of(_C.DRAINING, why=f" ({node.drain.why})" if node.drain.why else "")
        if node.cordoned:
            return Reason.of(_C.CORDONED)
        if not profile_fits(shape, node):
            return _none_of_the_kind(shape, [node])
        request, free = shape.request, self._free[row]
        if shape.control and (free[CONTROL_SLOTS] < 1 or free[CONTROL_MEMORY] < request.memory_bytes):
            return Reason.of(_C.NO_CONTROL_SLOT, slots=node.control.slots)
        if shape.gpu is not None:
            reason = self._of_devices(shape.gpu, row, fits)
            if reason is not None:
                return reason
        if request.cpu_milli > free[CPU] and not shape.control:
            return Reason.of(_C.CPU_SHORT, wanted_milli=request.cpu_milli, free_milli=max(0, free[CPU]))
        if request.memory_bytes > free[MEMORY] and not shape.control:
            return Reason.of(_C.MEMORY_SHORT, wanted_bytes=request.memory_bytes, free_bytes=max(0, free[MEMORY]))
        if request.disk_bytes > free[DISK] and not shape.control:
            return Reason.of(_C.DISK_SHORT, wanted_bytes=request.disk_bytes, free_bytes=max(0, free[DISK]))
        assert request.ports > free[PORTS], "a node that is rejected lacks something"
        return Reason.of(_C.PORTS_SHORT, wanted=request.ports, free=max(0, free[PORTS]))

    def _of_devices(self, gpu: GpuRequest, row: int, fits: Fits) -> Reason | None:
        seen, declared = self._devices[row], fits.columns.devices[row]
        if seen.fit >= gpu.count:
            return None
        unwell = sum(not device.healthy for device in declared)
        why = next((f": GPU {device.index}: {device.unwell}" for device in declared if device.unwell), "")
        if not seen.allowed:
            all_unwell = unwell and unwell == len(declared)
            return Reason.of(_C.GPU_UNHEALTHY, count=unwell, why=why) if all_unwell else _no_such_device(fits, np.array([row]))
        if seen.allowed < gpu.count <= seen.allowed + unwell:
            return Reason.of(_C.GPU_UNHEALTHY, count=unwell, why=why)
        if seen.with_compute < gpu.count:
            return Reason.of(_C.GPU_SHORT, wanted=gpu.count, wanted_milli=seen.compute, fit=seen.with_compute)
        if seen.with_memory < gpu.count:
            return Reason.of(_C.GPU_MEMORY_SHORT, wanted_mib=seen.memory, free_mib=max(0, seen.memory_free))
        return Reason.of(_C.MPS_USER)


def _devices_of_all(fits: Fits) -> list[_Devices]:
    columns = fits.columns
    kind = columns.kind
    compute, memory = fits.device_compute[kind], fits.device_memory[kind]
    allowed = compute < TOO_MUCH
    with_compute = allowed & (columns.compute >= compute)
    with_memory = with_compute & (columns.gpu_memory >= memory)
    fit = fits.fitting_devices(np.arange(len(columns.names)))
    counts: list[IntArray] = [
        *(part.sum(1) for part in (allowed, with_compute, with_memory, fit)),
        compute.min(1),
        memory.min(1),
        np.where(allowed, columns.gpu_memory, 0).max(1),
    ]
    return [_Devices(*row) for row in np.stack(counts, 1).tolist()]


def _shown(shape: Shape) -> str:
    return ", ".join(f"{key}={value}" for key, value in shape.labels)
