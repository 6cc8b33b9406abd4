"""What a task asks for next that ran out of memory: more by its factor, within its own bound, its quota and the largest node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from crater_core.model.allocation import Allocation
from crater_core.model.node import GpuDevice, Node
from crater_core.model.quota import Limits
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Task, TaskSpec
from crater_core.model.units import MILLI

_OF_MEMORY = (ReasonCode.OOM_KILLED, ReasonCode.MEMORY_EXCEEDED)
Bound = tuple[int, str]
"""The most of it, and who says so."""


def after_oom(snapshot: Snapshot, task: Task, last: Allocation, reason: Reason | None) -> Request | Reason | None:
    """The request of the next try; a reason when no more can be had; None when this is no matter of memory, or of no retry."""
    policy, spec = task.spec.retry.on_oom, task.asked
    attempts = min(task.spec.retry.attempts_max, snapshot.settings.attempts_max)
    if policy is None or reason is None or task.attempt - task.excused >= attempts or task.spec.service is not None:
        return None
    request = spec.request
    if reason.code in _OF_MEMORY:
        own = () if policy.memory_max_bytes is None else ((policy.memory_max_bytes, "the task itself"),)
        bound = min((*own, *_memory_bounds(snapshot, spec)), default=None)
        grown = _larger("memory", request.memory_bytes, policy.factor_milli, bound)
        return grown if isinstance(grown, Reason) else replace(request, memory_bytes=grown)
    gpu = request.gpu
    if reason.code is ReasonCode.GPU_MEMORY_EXCEEDED and gpu is not None and not gpu.exclusive and last.grants:
        own = () if policy.gpu_memory_max_mib is None else ((policy.gpu_memory_max_mib, "the task itself"),)
        bound = min((*own, *_gpu_memory_bounds(snapshot, spec, gpu)), default=None)
        grown = _larger("gpu_memory", min(grant.memory_mib for grant in last.grants), policy.factor_milli, bound)
        return grown if isinstance(grown, Reason) else replace(request, gpu=replace(gpu, memory_mib=grown))
    return None


def _larger(resource: str, had: int, factor_milli: int, bound: Bound | None) -> int | Reason:
    wanted = -(-had * factor_milli // MILLI)
    if bound is None or wanted <= bound[0]:
        return wanted
    if had < bound[0]:
        return bound[0]
    return Reason.of(ReasonCode.NO_MORE_MEMORY, resource=resource, limit=had, largest=bound[0], bound=bound[1])


def _memory_bounds(snapshot: Snapshot, spec: TaskSpec) -> Iterator[Bound]:
    for limits, whose in _limits(snapshot, spec):
        if limits.memory_bytes is not None:
            yield limits.memory_bytes // spec.members_fewest, whose
    nodes = list(_nodes(snapshot, spec))
    if nodes:
        largest = max(nodes, key=lambda node: (node.allocatable.memory_bytes, node.name))
        yield largest.allocatable.memory_bytes, f"the largest node ({largest.name})"


def _gpu_memory_bounds(snapshot: Snapshot, spec: TaskSpec, gpu: GpuRequest) -> Iterator[Bound]:
    devices = [device for node in _nodes(snapshot, spec) for device in _shared(node.devices, gpu)]
    if not devices:
        return
    largest = max(devices, key=lambda device: (device.memory_mib, device.uuid))
    yield largest.memory_mib, f"the largest device ({largest.model})"
    for limits, whose in _limits(snapshot, spec):
        if limits.gpu_milli is not None and not gpu.compute_milli:
            # By memory alone, a share takes the same fraction of compute, which is what quota counts.
            compute_milli = min(MILLI, limits.gpu_milli // (spec.members_fewest * gpu.count))
            yield largest.memory_mib * compute_milli // MILLI, whose


def _shared(devices: Iterable[GpuDevice], gpu: GpuRequest) -> Iterator[GpuDevice]:
    for device in devices:
        known = {device.gpu_type.lower(), device.gpu_type.lower().removeprefix("nvidia-"), device.model.lower()}
        if device.shareable and (not gpu.types or known.intersection(gpu.types)):
            yield device


def _nodes(snapshot: Snapshot, spec: TaskSpec) -> Iterator[Node]:
    """Those of the kind that it asks for, ready or not."""
    for node in snapshot.nodes.values():
        if all(node.labels.get(key) == value for key, value in spec.node_labels.items()) and node.pools.keys() >= set(spec.pools):
            yield node


def _limits(snapshot: Snapshot, spec: TaskSpec) -> Iterator[tuple[Limits, str]]:
    for name, policy in sorted(snapshot.policies.items()):
        if name == spec.quota_policy or (spec.quota_policy is None and spec.project in policy.projects):
            yield policy.limits, f"quota policy {name}"
            yield policy.user_limits, f"quota policy {name}, for each user,"
