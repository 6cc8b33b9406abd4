"""Hours held in a window of time, grouped: closed records and live allocations alike, clipped to the window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from crater_core.lifecycle.metering import close_record
from crater_core.model.snapshot import Snapshot
from crater_core.model.usage import UsageRecord
from crater_core.wire.usage import UsageReport, UsageRow

GROUPS = ("project", "user", "quota_policy", "node", "task", "name")
NONE = "(none)"


@dataclass(slots=True)
class _Sum:
    tasks: set[str] = field(default_factory=lambda: set[str]())
    gpu_hours: float = 0.0
    core_hours: float = 0.0
    gb_hours: float = 0.0


def live_records(snapshot: Snapshot, now_ms: int) -> list[UsageRecord]:
    """Live allocations as if they ended now."""
    return [
        close_record(snapshot.tasks[allocation.task], replace(allocation, ended_at_ms=now_ms))
        for allocation in snapshot.allocations.values()
    ]


def usage_report(records: Iterable[UsageRecord], by: str, from_ms: int, to_ms: int) -> UsageReport:
    """Each allocation counts once (a closed record wins over a live one that comes after it). Largest rows first."""
    sums: dict[str, _Sum] = {}
    seen: set[str] = set()
    for record in records:
        if record.allocation in seen or record.to_ms <= from_ms or record.from_ms >= to_ms:
            continue
        seen.add(record.allocation)
        clipped = replace(record, from_ms=max(record.from_ms, from_ms), to_ms=min(record.to_ms, to_ms))
        total = sums.setdefault(getattr(record, by) or NONE, _Sum())
        total.tasks.add(record.task)
        total.gpu_hours += clipped.gpu_hours
        total.core_hours += clipped.core_hours
        total.gb_hours += clipped.gb_hours
    ordered = sorted(sums.items(), key=lambda pair: (-pair[1].gpu_hours, -pair[1].core_hours, pair[0]))
    rows = [
        UsageRow(key=key, tasks=len(s.tasks), gpu_hours=s.gpu_hours, core_hours=s.core_hours, gb_hours=s.gb_hours)
        for key, s in ordered
    ]
    return UsageReport(by=by, from_ms=from_ms, to_ms=to_ms, rows=rows)
