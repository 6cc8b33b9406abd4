"""Services: a template with replicas, its port and health path."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from crater_core.model.service import Service
from crater_core.model.task import OnDisconnect, RetryPolicy, TaskSpec, TaskType
from crater_core.wire.base import Incoming, Outgoing, ReasonView
from crater_core.wire.resources import Bytes, Resources
from crater_core.wire.tasks import EnvName, HealthBody, Label, MountBody, Path, Slug, TaskSubmission, TaskView, Text, health_check

REPLICAS_MAX = 1000


class ServiceBody(Incoming):
    """A service to deploy, or its next version. Each replica finds its port in CRATER_PORT; `{port}` in command is replaced."""

    name: Slug
    type: Literal["inference", "batch"] = "inference"
    project: Slug = "default"
    priority: int = Field(default=60, ge=0, le=100)
    replicas: int = Field(default=1, ge=0, le=REPLICAS_MAX)
    command: tuple[Text, ...] = ()
    image: str | None = None
    env: dict[EnvName, Text] = {}
    env_profile: Slug | None = None
    working_dir: Path | None = None
    mounts: tuple[MountBody, ...] = ()
    shared_memory: Bytes = 0
    resources: Resources = Resources()
    pools: tuple[Slug, ...] = ()
    node_labels: dict[Label, Label] = {}
    quota_policy: Slug | None = None
    strategy: Slug | None = None
    ports: int = Field(default=1, ge=1, le=16)
    health: HealthBody = HealthBody()
    gpu_visible_devices: Literal["uuid", "index"] = "uuid"
    grace: int | float | str = "10s"
    on_disconnect: Literal["stop", "keep"] = "keep"
    labels: dict[Label, Label] = {}

    @model_validator(mode="after")
    def _valid_as_a_task(self) -> ServiceBody:
        self._as_task()
        return self

    def _as_task(self) -> TaskSubmission:
        return TaskSubmission.model_validate(
            {
                "name": self.name,
                "type": self.type,
                "project": self.project,
                "priority": self.priority,
                "command": self.command,
                "image": self.image,
                "env": self.env,
                "env_profile": self.env_profile,
                "working_dir": self.working_dir,
                "mounts": self.mounts,
                "shared_memory": self.shared_memory,
                "resources": self.resources,
                "pools": self.pools,
                "node_labels": self.node_labels,
                "quota_policy": self.quota_policy,
                "strategy": self.strategy,
                "gpu_visible_devices": self.gpu_visible_devices,
                "grace": self.grace,
                "on_disconnect": self.on_disconnect,
                "ports": self.ports,
                "labels": self.labels,
            }
        )

    def to_template(self, user: str) -> TaskSpec:
        spec = self._as_task().to_spec(user)
        return replace(
            spec,
            type=TaskType(self.type),
            service=self.name,
            health=health_check(self.health),
            retry=RetryPolicy(on_node_loss=False),
            on_disconnect=OnDisconnect(self.on_disconnect),
        )


class ScaleBody(Incoming):
    replicas: int = Field(ge=0, le=REPLICAS_MAX)
    reason: str = Field(default="", max_length=1000)


class ReplicaView(Outgoing):
    task: str
    status: str
    ready: bool
    node: str | None = None
    url: str | None = None
    """Where it answers, once it has a port: http://ADDRESS:PORT."""
    generation: int = 0
    reason: ReasonView | None = None
    cpu_percent_milli: int | None = None
    """CPU use over the last sample in thousandths of the requested cores; None while there is no sample."""


class ServiceView(Outgoing):
    name: str
    project: str
    user: str
    status: str
    replicas: int
    ready: int
    generation: int
    quota_policy: str | None = None
    health_path: str
    created_at_ms: int
    changed_at_ms: int
    removed: bool = False
    cpu_percent: float | None = None
    """Mean CPU use of the ready replicas in percent of the requested cores; None when no replica has a sample."""
    replica_list: list[ReplicaView] = []


def service_view(service: Service, replicas: list[ReplicaView]) -> ServiceView:
    samples = [r.cpu_percent_milli for r in replicas if r.ready and r.cpu_percent_milli is not None]
    template = service.template
    return ServiceView(
        name=service.name,
        project=template.project,
        user=template.user,
        status=service.status.value,
        replicas=service.replicas,
        ready=sum(r.ready and r.generation == service.generation for r in replicas),
        generation=service.generation,
        quota_policy=template.quota_policy,
        health_path=template.health.path if template.health else "",
        created_at_ms=service.created_at_ms,
        changed_at_ms=service.changed_at_ms,
        removed=service.removed,
        cpu_percent=sum(samples) / len(samples) / 10 if samples else None,
        replica_list=replicas,
    )


class ServicePage(Outgoing):
    services: list[ServiceView]


def replica_view(view: TaskView, address: str | None, generation: int, sampled: bool) -> ReplicaView:
    return ReplicaView(
        task=view.id,
        status=view.status,
        ready=view.ready,
        node=view.node,
        url=f"http://{address}:{view.ports[0]}" if address and view.ports else None,
        generation=generation,
        reason=view.reason,
        cpu_percent_milli=view.cpu_percent_milli if sampled else None,
    )
