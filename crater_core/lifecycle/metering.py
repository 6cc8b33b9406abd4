"""Closes the usage record of an allocation, in the same commit that ends it."""

from __future__ import annotations

from crater_core.model.allocation import Allocation
from crater_core.model.task import Task
from crater_core.model.usage import UsageRecord


def close_record(task: Task, allocation: Allocation) -> UsageRecord:
    """The interval from assignment to end: an allocation is charged for as long as it keeps others out."""
    assert allocation.ended_at_ms is not None, "only an ended allocation is metered"
    spec = task.spec
    return UsageRecord(
        allocation=allocation.id,
        task=task.id,
        name=spec.name,
        project=spec.project,
        user=spec.user,
        quota_policy=spec.quota_policy,
        node=allocation.node,
        held=allocation.held,
        from_ms=allocation.assigned_at_ms,
        to_ms=max(allocation.ended_at_ms, allocation.assigned_at_ms),
        used_cpu_ms=allocation.use.cpu_ms,
        memory_peak_bytes=allocation.use.memory_peak_bytes,
        used_gpu_ms=allocation.use.gpu_busy_ms,
        gpu_memory_peak_mib=allocation.use.gpu_memory_peak_mib,
        outcome=allocation.status.value,
        labels=tuple(sorted(spec.labels.items())),
    )
