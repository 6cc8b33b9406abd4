"""How long a task has left its GPUs unused. Pure. Any use begins the window anew, and so does not knowing."""

from __future__ import annotations

from collections.abc import Iterable


def idle_since(since_ms: int | None, used: Iterable[bool | None], now_ms: int) -> int | None:
    """`since_ms`: the answer after the last look; `used`: of each device of the task, whether it was used since then, None where
    that cannot be told. The answer is None while the task counts as using its devices. A task is idle when *all* of them are."""
    return (now_ms if since_ms is None else since_ms) if all(one is False for one in used) else None
