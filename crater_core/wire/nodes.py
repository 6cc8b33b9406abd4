"""Nodes, pools and quota policies as callers see them."""

from __future__ import annotations

from pydantic import Field, model_validator

from crater_core.model.node import GpuDevice, Node
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.resources import Amounts
from crater_core.wire.base import Incoming, Outgoing
from crater_core.wire.resources import AmountsView, Bytes, DurationMs, Milli
from crater_core.wire.tasks import Slug


class DeviceView(Outgoing):
    uuid: str
    index: int
    model: str
    gpu_type: str
    memory_mib: int
    pool: str
    sharing: str
    overcommit_milli: int
    healthy: bool
    unwell: str = ""
    simulated: bool
    compute_capability: str = ""
    card_milli: int = 1000
    used_compute_milli: int = 0
    used_memory_mib: int = 0

    @staticmethod
    def of(device: GpuDevice, used_compute_milli: int = 0, used_memory_mib: int = 0) -> DeviceView:
        return DeviceView(
            uuid=device.uuid,
            index=device.index,
            model=device.model,
            gpu_type=device.gpu_type,
            memory_mib=device.memory_mib,
            pool=device.pool,
            sharing=device.sharing.value,
            overcommit_milli=device.overcommit_milli,
            healthy=device.healthy,
            unwell=device.unwell,
            simulated=device.simulated,
            compute_capability=device.compute_capability,
            card_milli=device.card_milli,
            used_compute_milli=used_compute_milli,
            used_memory_mib=used_memory_mib,
        )


class DrainBody(Incoming):
    deadline: DurationMs | None = Field(default=None, description="after this long, what still runs is stopped and queued again")
    reason: str = Field(default="", max_length=1000)


class DrainView(Outgoing):
    """`deadline_ms`: when what still runs is stopped and queued again; none: it runs to its end."""

    by: str
    reason: str
    since_ms: int
    deadline_ms: int | None = None


class NodeView(Outgoing):
    name: str
    status: str
    cordoned: bool
    drain: DrainView | None = None
    labels: dict[str, str]
    pools: dict[str, str]
    capacity: AmountsView
    allocatable: AmountsView
    free: AmountsView
    devices: list[DeviceView] = []
    allocations: int = 0
    control_slots: int = 0
    control_used: int = 0
    runtimes: list[str] = []
    enforcement: str = ""
    address: str = ""
    agent_version: str = ""
    notes: list[str] = []
    heartbeat_age_ms: int = 0
    registered_at_ms: int = 0


def node_view(
    node: Node,
    free: Amounts,
    used: dict[str, tuple[int, int]],
    *,
    allocations: int = 0,
    control_used: int = 0,
    heartbeat_age_ms: int = 0,
) -> NodeView:
    """`used` maps a device's UUID to (compute in thousandths, memory in MiB) given out."""
    drain = node.drain
    return NodeView(
        name=node.name,
        status=node.status.value,
        cordoned=node.cordoned,
        drain=DrainView(by=drain.by, reason=drain.why, since_ms=drain.since_ms, deadline_ms=drain.deadline_ms) if drain else None,
        labels=dict(node.labels),
        pools={name: kind.value for name, kind in node.pools.items()},
        capacity=AmountsView.of(node.capacity),
        allocatable=AmountsView.of(node.allocatable),
        free=AmountsView.of(free),
        devices=[DeviceView.of(device, *used.get(device.uuid, (0, 0))) for device in node.devices],
        allocations=allocations,
        control_slots=node.control.slots,
        control_used=control_used,
        runtimes=list(node.runtimes),
        enforcement=node.enforcement.value,
        address=node.address,
        agent_version=node.agent_version,
        notes=list(node.notes),
        heartbeat_age_ms=heartbeat_age_ms,
        registered_at_ms=node.registered_at_ms,
    )


class NodePage(Outgoing):
    nodes: list[NodeView]


class PoolView(Outgoing):
    """One pool, gathered over its nodes. Amounts are in the unit of its kind; a gpu pool counts compute."""

    name: str
    kind: str
    strategy: str
    nodes: list[str]
    capacity: AmountsView
    free: AmountsView
    devices: int = 0
    devices_free: int = 0


class PoolPage(Outgoing):
    pools: list[PoolView]


class LimitsBody(Incoming):
    """None leaves a resource unbounded."""

    gpu: Milli | None = None
    cpu: Milli | None = None
    memory: Bytes | None = None
    disk: Bytes | None = None

    def to_limits(self) -> Limits:
        return Limits(self.gpu, self.cpu, self.memory, self.disk)


class QuotaBody(Incoming):
    projects: tuple[Slug, ...] = Field(default=(), description="the projects it holds for; empty: any, by name")
    limits: LimitsBody = LimitsBody()
    user_limits: LimitsBody = Field(default=LimitsBody(), description="for each user inside the policy")
    guarantee: LimitsBody = Field(default=LimitsBody(), description="room that others do not take, or give back")
    lend: bool = Field(default=False, description="others may use what is guaranteed and not used, until it is wanted back")

    @model_validator(mode="after")
    def _guarantee_within_limits(self) -> QuotaBody:
        for field, unit in (("gpu", 1000), ("cpu", 1000), ("memory", 1), ("disk", 1)):
            guarantee, limit = getattr(self.guarantee, field), getattr(self.limits, field)
            if guarantee is not None and limit is not None and guarantee > limit:
                found = f"guarantee.{field} is {guarantee / unit:g}, more than limits.{field}, {limit / unit:g}"
                raise ValueError(f"{found}: a policy can be guaranteed no more than its limit")
        if self.lend and self.guarantee == LimitsBody():
            raise ValueError("lend needs a guarantee to lend: set guarantee.gpu, .cpu, .memory or .disk")
        return self

    def to_policy(self, name: str) -> QuotaPolicy:
        limits, user_limits, guarantee = (one.to_limits() for one in (self.limits, self.user_limits, self.guarantee))
        return QuotaPolicy(name, self.projects, limits, user_limits, guarantee, self.lend)


class LimitsView(Outgoing):
    gpu_milli: int | None = None
    cpu_milli: int | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None

    @staticmethod
    def of(limits: Limits) -> LimitsView:
        return LimitsView(
            gpu_milli=limits.gpu_milli,
            cpu_milli=limits.cpu_milli,
            memory_bytes=limits.memory_bytes,
            disk_bytes=limits.disk_bytes,
        )


class QuotaView(Outgoing):
    """`borrowed` is what is used above the guarantee, of the resources that one is set for."""

    name: str
    projects: list[str]
    limits: LimitsView
    user_limits: LimitsView
    guarantee: LimitsView = LimitsView()
    lend: bool = False
    borrowed: AmountsView = AmountsView()
    used: AmountsView
    used_by_user: dict[str, AmountsView] = {}


class QuotaPage(Outgoing):
    quotas: list[QuotaView]
