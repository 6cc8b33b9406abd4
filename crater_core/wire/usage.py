"""What was held, for whom, over a window of time."""

from __future__ import annotations

from crater_core.wire.base import Outgoing
from crater_core.wire.resources import AmountsView


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


class ShareView(Outgoing):
    """What decides a project's place among tasks of one priority. `held_milli` and `average_milli`: the largest part of the
    cluster's GPUs, cores, memory or disk, in thousandths; `share_milli`: their mean over the weight. The smaller goes first.
    """

    project: str
    weight_milli: int
    held: AmountsView
    average: AmountsView
    held_milli: int
    average_milli: int
    share_milli: int


class SharePage(Outgoing):
    """`half_life_ms`: how long ago use counts half in the average; 0: the past does not count."""

    half_life_ms: int
    shares: list[ShareView]


class Health(Outgoing):
    """`GET /health`: alive, and how it stands. `GET /ready` is the same, with 503 when it could not serve."""

    status: str
    version: str
    leader: bool
    revision: int
    term: int
    nodes_ready: int
    tasks_queued: int
    tasks_running: int


class LeaderView(Outgoing):
    """`leader` is the URL of the scheduler that leads, null when nobody does; `leading` says whether this one does."""

    leader: str | None
    leading: bool
    term: int
    revision: int
