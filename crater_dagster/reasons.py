"""Crater's words for Dagster: why a task waits or ended, in a sentence, in metadata and in a short code."""

from __future__ import annotations

from dagster import MetadataValue

from crater_core.model.reason import ReasonCode
from crater_core.model.units import show_bytes, show_duration
from crater_core.wire.base import ReasonView
from crater_core.wire.tasks import TaskView

_C = ReasonCode
_FAILURES = {
    _C.OOM_KILLED: "oom",
    _C.MEMORY_EXCEEDED: "oom",
    _C.NO_MORE_MEMORY: "oom",
    _C.GPU_MEMORY_EXCEEDED: "gpu_memory",
    _C.GPU_UNHEALTHY: "gpu_error",
    _C.GPU_FAULT: "gpu_error",
    _C.GPU_IDLE_STOPPED: "gpu_idle",
    _C.DISK_EXCEEDED: "disk",
    _C.TIME_LIMIT: "time_limit",
    _C.PREEMPTED: "preempted",
    _C.RECLAIMED: "preempted",
    _C.GAVE_WAY: "preempted",
    _C.DRAINED: "drained",
    _C.NODE_LOST: "node_lost",
    _C.ENGINE_LOST: "node_lost",
    _C.START_FAILED: "start_failed",
    _C.CANCELLED: "cancelled",
    _C.FINISHED: "no_end",
    _C.EXIT_CODE: "exit_code",
    _C.SIGNALLED: "signalled",
    _C.EXIT_UNKNOWN: "exit_unknown",
    _C.LARGER_THAN_QUOTA: "quota",
    _C.LARGER_THAN_ANY_NODE: "impossible",
}
FAILURE_TAG = "crater/failure_reason"
FAILED_STEP_TAG = "crater/failed_step"
NONE = "none"
"""Both tags of a run that was made from a failed one, until it fails itself."""


def failure_code(reason: ReasonView | None) -> str:
    """A short, stable word for retry policies and sensors."""
    if reason is None:
        return "unknown"
    try:
        return _FAILURES.get(ReasonCode(reason.code), reason.code)
    except ValueError:
        return reason.code


def sentence(reason: ReasonView | None) -> str:
    """The reason, then what a person can do about it."""
    if reason is None:
        return "The reason is not known."
    return f"{reason.message} {reason.next_step}".strip()


def how_it_ended(view: TaskView) -> str:
    """Where, how, why, with numbers: `Task t7 on node n1 failed: It was killed for ...`."""
    where = f" on node {view.node}" if view.node else ""
    ran = f" after {show_duration(view.ran_ms)}" if view.ran_ms else ""
    why = "It ended by itself with exit code 0." if view.status == "succeeded" else sentence(view.reason)
    return f"Task {view.id}{where} {view.status}{ran}: {why}"


def why_it_waits(view: TaskView) -> str | None:
    """The code of the reason why it waits; None when it does not, or when the scheduler has only just heard of it."""
    if view.status != "queued" or view.reason is None or view.reason.code == _C.NOT_YET_LOOKED_AT:
        return None
    return view.reason.code


def console_link(console_url: str, task_id: str) -> str:
    """The console's page of one task."""
    return f"{console_url.rstrip('/')}/#task={task_id}"


def figures(view: TaskView, link: str) -> dict[str, MetadataValue]:
    """What a task has cost so far, where it ran, and where it is shown."""
    devices = [f"{d.uuid} ({d.compute_milli / 1000:g} of it)" + (", simulated" if d.simulated else "") for d in view.devices]
    shown: dict[str, MetadataValue] = {
        "crater/task": MetadataValue.text(view.id),
        "crater/link": MetadataValue.url(link),
        "crater/node": MetadataValue.text(view.node or "none"),
        "crater/devices": MetadataValue.text(", ".join(devices) or "none"),
        "crater/waited_s": MetadataValue.float(view.waited_ms / 1000),
        "crater/ran_s": MetadataValue.float(view.ran_ms / 1000),
        "crater/gpu_hours": MetadataValue.float(round(view.gpu_hours, 6)),
        "crater/core_hours": MetadataValue.float(round(view.core_hours, 6)),
        "crater/gb_hours": MetadataValue.float(round(view.gb_hours, 6)),
    }
    if view.memory_peak_bytes:
        shown["crater/memory_peak"] = MetadataValue.text(show_bytes(view.memory_peak_bytes))
    if view.gpu_memory_peak_mib:
        shown["crater/gpu_memory_peak_mib"] = MetadataValue.int(view.gpu_memory_peak_mib)
    if view.gpu_busy_hours:
        shown["crater/gpu_busy_hours"] = MetadataValue.float(round(view.gpu_busy_hours, 6))
    if view.attempt > 1:
        shown["crater/attempts"] = MetadataValue.int(view.attempt)
    return shown
