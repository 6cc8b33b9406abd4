"""After a restart: which workloads of an earlier agent still run, which have ended meanwhile, and which nobody wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crater_agent.forked import start_ticks
from crater_agent.proctree import is_alive
from crater_agent.reconcile import Exit, Phase
from crater_agent.records import Kept, Records
from crater_agent.workload import Workload
from crater_core.model.allocation import AllocationStatus
from crater_core.model.reason import Reason, ReasonCode


def adopt(
    records: Records,
    every: Sequence[Kept],
    children: dict[str, int],
    boot_id: str,
    node: str,
    silent_ms: int,
    alive: Callable[[int, int], bool] = is_alive,
) -> list[Workload]:
    """`children`: what the living spawner says runs under it, by name. Call after it has answered: then an exit of what it
    does not name is on disk."""
    found = [_adopt_one(records, kept, children, boot_id, node, silent_ms, alive) for kept in every]
    return [workload for workload in found if workload is not None]


def _adopt_one(
    records: Records,
    kept: Kept,
    children: dict[str, int],
    boot_id: str,
    node: str,
    silent_ms: int,
    alive: Callable[[int, int], bool],
) -> Workload | None:
    record = kept.record
    workload = Workload(record, silent_ms=silent_ms)
    if kept.final is not None:
        # Maybe it was reported already: told twice is taken once.
        workload.conclude(kept.final)
        return workload
    if kept.pid is None and record.allocation in children:
        # It is on its way between the fork and its first record.
        pid = children[record.allocation]
        workload.phase, workload.pid, workload.start_ticks, workload.orphan = Phase.RUNNING, pid, start_ticks(pid) or 0, True
        return workload
    if kept.pid is None:
        # It never began: the lease, if it is still wanted, is taken anew.
        records.forget(record.allocation)
        return None
    workload.phase, workload.pid, workload.start_ticks = Phase.RUNNING, kept.pid, kept.start_ticks
    if kept.exit is not None:
        workload.exit = exit_of(kept.exit)
    elif record.boot_id != boot_id:
        workload.exit = Exit(known=False)
        workload.stop = (AllocationStatus.LOST, Reason.of(ReasonCode.NODE_LOST, node=node, silent_ms=silent_ms))
    elif record.allocation not in children:
        workload.orphan = True
        if not alive(kept.pid, kept.start_ticks):
            workload.exit = Exit(known=False)
    workload.ready = workload.exit is None and records.is_ready(record.allocation)
    workload.pending = [workload.progress()] if workload.exit is None else []
    return workload


def exit_of(raw: dict[str, Any]) -> Exit:
    return Exit(
        code=raw.get("code"),
        signal=raw.get("signal"),
        known=bool(raw.get("known", True)),
        fenced=bool(raw.get("fenced")),
        oom_kills=int(raw.get("oom_kills", 0)),
        engine_lost=bool(raw.get("engine_lost")),
    )
