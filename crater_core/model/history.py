"""One line of the story of a task or a node, kept for people and for watchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from crater_core.model.reason import Reason


@dataclass(frozen=True, slots=True)
class Event:
    """`subject` is "task", "node" or "service"; `what` is a past-tense verb such as "queued", "started", "cordoned"."""

    at_ms: int
    subject: str
    id: str
    what: str
    reason: Reason | None = None
    facts: Mapping[str, str | int] = field(default_factory=lambda: {})
    group: str | None = None
