"""What was held, for whom, over a window of time."""

from __future__ import annotations

from crater_core.wire.base import Outgoing


class UsageRow(Outgoing):
    """`key` is the project, user, quota policy, node or task that the report is grouped by. Hours are clipped to the window."""

    key: str
    tasks: int
    gpu_hours: float
    core_hours: float
    gb_hours: float


class UsageReport(Outgoing):
    by: str
    from_ms: int
    to_ms: int
    rows: list[UsageRow]


class Health(Outgoing):
    """`GET /health`: alive, and able to decide."""

    status: str
    version: str
    leader: bool
    revision: int
    term: int
    nodes_ready: int
    tasks_queued: int
    tasks_running: int
