"""Advance reservations as callers see them."""

from __future__ import annotations

from pydantic import Field, model_validator

from crater_core.model.reservation import Reservation
from crater_core.wire.base import Incoming, Outgoing
from crater_core.wire.resources import Bytes, DurationMs, Milli
from crater_core.wire.tasks import Slug


class ReservationBody(Incoming):
    """Say until when by `to_ms` or by `duration`. Without `from_ms` it begins now."""

    project: Slug
    name: Slug | None = Field(default=None, description="made up when absent")
    from_ms: int | None = Field(default=None, ge=0, le=2**53)
    to_ms: int | None = Field(default=None, ge=0, le=2**53)
    duration: DurationMs | None = None
    gpus: int = Field(default=0, ge=0, le=1_000_000, description="whole devices")
    cpu: Milli = 0
    memory: Bytes = 0
    gpu_types: tuple[str, ...] = Field(default=(), max_length=20)
    node_labels: dict[str, str] = Field(default={}, max_length=50)
    reason: str = Field(default="", max_length=1000)

    @model_validator(mode="after")
    def _whole(self) -> ReservationBody:
        if (self.to_ms is None) == (self.duration is None):
            raise ValueError("give to_ms or duration, one of them")
        if not self.gpus and not self.cpu and not self.memory:
            raise ValueError("a reservation needs gpus, cpu or memory")
        return self

    def to_reservation(self, name: str, by: str, now_ms: int) -> Reservation:
        """Without its parts."""
        from_ms = now_ms if self.from_ms is None else self.from_ms
        to_ms = self.to_ms if self.to_ms is not None else from_ms + (self.duration or 0)
        return Reservation(
            name=name,
            project=self.project,
            from_ms=from_ms,
            to_ms=to_ms,
            gpus=self.gpus,
            cpu_milli=self.cpu,
            memory_bytes=self.memory,
            gpu_types=self.gpu_types,
            node_labels=dict(self.node_labels),
            by=by,
            why=self.reason,
            created_at_ms=now_ms,
        )


class PartView(Outgoing):
    node: str
    gpus: int
    cpu_milli: int
    memory_bytes: int


class ReservationView(Outgoing):
    """`parts`: where it is; `active`: its time has come."""

    name: str
    project: str
    from_ms: int
    to_ms: int
    active: bool
    gpus: int
    cpu_milli: int
    memory_bytes: int
    gpu_types: list[str] = []
    node_labels: dict[str, str] = {}
    parts: list[PartView] = []
    by: str = ""
    reason: str = ""
    created_at_ms: int = 0

    @staticmethod
    def of(one: Reservation, now_ms: int) -> ReservationView:
        parts = [
            PartView(node=part.node, gpus=part.gpus, cpu_milli=part.cpu_milli, memory_bytes=part.memory_bytes)
            for part in one.parts
        ]
        return ReservationView(
            name=one.name,
            project=one.project,
            from_ms=one.from_ms,
            to_ms=one.to_ms,
            active=one.active(now_ms),
            gpus=one.gpus,
            cpu_milli=one.cpu_milli,
            memory_bytes=one.memory_bytes,
            gpu_types=list(one.gpu_types),
            node_labels=dict(one.node_labels),
            parts=parts,
            by=one.by,
            reason=one.why,
            created_at_ms=one.created_at_ms,
        )


class ReservationPage(Outgoing):
    reservations: list[ReservationView]
