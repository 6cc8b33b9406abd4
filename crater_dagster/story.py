"""A task's history and its last lines of output, as text for an event log."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from crater_core.client import CraterClient
from crater_core.errors import CraterError
from crater_core.wire.base import ReasonView
from crater_core.wire.tasks import EventView

LINES = 50
TAIL_BYTES = 16 * 1024


def timeline(events: Iterable[EventView]) -> list[str]:
    """One line an event: when, what, where, why."""
    lines: list[str] = []
    for event in events:
        at = datetime.fromtimestamp(event.at_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
        facts = "".join(f" {name}={value}" for name, value in event.facts.items())
        lines.append(f"{at} {event.what}{facts}" + (f": {event.reason.message}" if event.reason else ""))
    return lines


def why_queued_again(client: CraterClient, task_id: str) -> ReasonView | None:
    """Why the task's last attempt was ended and another one takes its place; None when nobody can be asked."""
    try:
        return next((event.reason for event in reversed(client.events(task_id)) if event.what == "queued_again"), None)
    except CraterError:
        return None


def last_lines(client: CraterClient, task_id: str, lines: int = LINES) -> list[str]:
    """The end of both streams; what cannot be read is said."""
    found: list[str] = []
    for stream in ("stderr", "stdout"):
        try:
            text = _tail(client, task_id, stream)
        except CraterError as error:
            found.append(f"{stream} cannot be read: {error.message}")
            continue
        if text.strip():
            found += [f"Last lines of {stream}:", *text.rstrip().splitlines()[-lines:]]
    return found


def _tail(client: CraterClient, task_id: str, stream: str) -> str:
    data, offset = b"", 0
    while True:
        chunk = client.logs(task_id, stream, offset=offset)  # type: ignore[arg-type]
        data = (data + chunk.data)[-TAIL_BYTES:]
        if not chunk.data or chunk.next_offset <= offset:
            return data.decode("utf-8", "replace")
        offset = chunk.next_offset
