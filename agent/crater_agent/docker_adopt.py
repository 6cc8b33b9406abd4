"""What a new agent makes of a container that an earlier one had, from the records on disk and what the engine shows."""

from __future__ import annotations

from crater_agent.adopt import exit_of
from crater_agent.docker_engine import Container
from crater_agent.docker_life import Run
from crater_agent.reconcile import Exit, Phase
from crater_agent.records import Kept
from crater_agent.workload import Workload
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode


def take_over(kept: Kept, found: Container | None, boot_id: str, node: str, silent_ms: int) -> tuple[Workload, Run | None] | None:
    """Its workload, and its run unless its end has been told to the end; None where nothing had begun.

    `found` is None, too, while the engine is away: it counts as running then, until the engine is listened to."""
    record = kept.record
    workload = Workload(record, Phase.RUNNING, silent_ms=silent_ms)
    if kept.final is not None:
        workload.conclude(kept.final)
        return workload, None
    if not (kept.pid is not None or kept.exit is not None or (found is not None and found.started)):
        return None
    run = Run(record, record.group, made=True, began=True, pid=kept.pid or 0, start_ticks=kept.start_ticks)
    workload.pid, workload.start_ticks = run.pid, run.start_ticks
    if kept.exit is not None:
        workload.exit = exit_of(kept.exit)
    elif record.boot_id != boot_id and not (found is not None and found.running):
        workload.exit = Exit(known=False)
        workload.stop = (AllocationStatus.LOST, Reason.of(ReasonCode.NODE_LOST, node=node, silent_ms=silent_ms))
    run.ending = run.ended = workload.exit is not None
    return workload, run
