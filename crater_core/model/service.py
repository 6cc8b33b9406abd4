"""A task template with replicas: what is wanted, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from crater_core.model.task import TaskSpec


class ServiceStatus(StrEnum):
    DEPLOYING = "deploying"
    READY = "ready"
    DEGRADED = "degraded"
    REMOVING = "removing"


@dataclass(frozen=True, slots=True)
class Service:
    """`template` is the spec of every replica of generation `generation`; its `request.ports` counts the ports."""

    name: str
    template: TaskSpec
    replicas: int
    generation: int = 1
    status: ServiceStatus = ServiceStatus.DEPLOYING
    created_at_ms: int = 0
    changed_at_ms: int = 0
    failures: int = 0
    """Replicas of this generation that ended without being asked to, since one was last ready: paces replacement."""
    retry_at_ms: int = 0
    removed: bool = False
