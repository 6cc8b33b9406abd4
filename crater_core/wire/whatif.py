"""What would become of tasks that are not submitted, and when a waiting one is expected to start."""

from __future__ import annotations

from crater_core.model.allocation import Placement
from crater_core.wire.base import Outgoing, ReasonView


class PlaceView(Outgoing):
    member: int
    node: str
    devices: list[str] = []
    """UUIDs."""

    @staticmethod
    def of(placement: Placement) -> PlaceView:
        return PlaceView(member=placement.member, node=placement.node, devices=[grant.uuid for grant in placement.grants])


class VerdictView(Outgoing):
    """`outcome`: refused (`field` says what to change), placed, preempting (once `victims` have stopped) or waiting."""

    name: str
    outcome: str
    field: str | None = None
    reason: ReasonView | None = None
    places: list[PlaceView] = []
    victims: list[str] = []
    expected_start_ms: int | None = None
    expected_sure: bool = False
    """Only declared time limits were counted on."""
    expected_note: str = ""
    """Why there is no expected start."""


class DryRun(Outgoing):
    """A verdict for each task, in their order, at one revision."""

    revision: int
    verdicts: list[VerdictView]
