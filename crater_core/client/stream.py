"""Server-sent events, read line by line."""

from __future__ import annotations

from crater_core.wire.tasks import EventView


class EventLines:
    """Feed it lines; it gives an event when one is whole. `last` is the sequence to go on from after a break."""

    def __init__(self, after: int | None = None) -> None:
        self.last = after
        self._data: list[str] = []

    def feed(self, line: str) -> EventView | None:
        if line.startswith("data:"):
            self._data.append(line.removeprefix("data:").removeprefix(" "))
        if line or not self._data:
            return None
        text, self._data = "\n".join(self._data), []
        event = EventView.model_validate_json(text)
        self.last = event.sequence
        return event

    def broken(self) -> None:
        """The connection is lost: what was half read will come again."""
        self._data = []
