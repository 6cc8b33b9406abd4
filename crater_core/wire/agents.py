"""What an agent and the scheduler say to each other.

The scheduler's word is a whole list of leases: what is not in it is to be stopped. The agent's word is reports with the
lease's token: a report under an older token is for somebody else's lease and is refused. An agent only ever calls out.
"""

from __future__ import annotations

from pydantic import Field

from crater_core.model.allocation import Allocation, AllocationStatus, Use
from crater_core.model.node import ControlShare, Enforcement, GpuDevice, Node, PoolKind, SharingMode
from crater_core.model.reason import Fact, Reason, ReasonCode
from crater_core.model.resources import Amounts
from crater_core.model.task import OnDisconnect, Task, VisibleDevices
from crater_core.wire.base import Incoming, Outgoing
from crater_core.wire.resources import GrantView
from crater_core.wire.tasks import Slug


class DeviceDeclaration(Incoming):
    uuid: str = Field(min_length=1, max_length=200)
    index: int = Field(ge=0, le=1023)
    model: str = Field(max_length=200)
    gpu_type: str = Field(max_length=100)
    memory_mib: int = Field(ge=0, le=2**24)
    pool: Slug
    sharing: SharingMode = SharingMode.EXCLUSIVE
    overcommit_milli: int = Field(default=1000, ge=1000, le=10_000)
    numa_node: int | None = None
    links: tuple[str, ...] = ()
    healthy: bool = True
    unwell: str = Field(default="", max_length=1000, description="why it is in quarantine, where it is not healthy")
    simulated: bool = False
    compute_capability: str = Field(default="", max_length=20)
    card_milli: int = Field(default=1000, ge=1, le=1000, description="how much of a card it is: less than 1000 for a MIG slice")


class AmountsDeclaration(Incoming):
    cpu_milli: int = Field(default=0, ge=0, le=10**9)
    memory_bytes: int = Field(default=0, ge=0, le=2**60)
    disk_bytes: int = Field(default=0, ge=0, le=2**60)

    def to_amounts(self) -> Amounts:
        return Amounts(self.cpu_milli, self.memory_bytes, self.disk_bytes)


class NodeDeclaration(Incoming):
    """Everything an agent says of its node when it registers."""

    labels: dict[str, str] = {}
    pools: dict[Slug, PoolKind] = {}
    capacity: AmountsDeclaration = AmountsDeclaration()
    allocatable: AmountsDeclaration = AmountsDeclaration()
    devices: tuple[DeviceDeclaration, ...] = Field(default=(), max_length=1024)
    control_slots: int = Field(default=16, ge=0, le=10_000)
    control_memory_bytes: int = Field(default=16 * 1024**3, ge=0)
    port_first: int = Field(default=20_000, ge=1024, le=65_535)
    port_count: int = Field(default=1_000, ge=0, le=60_000)
    runtimes: tuple[str, ...] = ("process",)
    enforcement: Enforcement = Enforcement.WATCHED
    address: str = Field(default="127.0.0.1", max_length=255)
    agent_url: str = Field(default="", max_length=500)
    agent_secret: str = Field(default="", max_length=200, description="what the scheduler shows to read logs; kept in memory")
    agent_version: str = ""
    boot_id: str = ""
    notes: tuple[str, ...] = ()

    def to_node(self, name: str) -> Node:
        return Node(
            name=name,
            labels=self.labels,
            pools=dict(self.pools),
            capacity=self.capacity.to_amounts(),
            allocatable=self.allocatable.to_amounts(),
            devices=tuple(GpuDevice(**device.model_dump()) for device in self.devices),
            control=ControlShare(self.control_slots, self.control_memory_bytes),
            port_first=self.port_first,
            port_count=self.port_count,
            runtimes=self.runtimes,
            enforcement=self.enforcement,
            address=self.address,
            agent_url=self.agent_url,
            agent_version=self.agent_version,
            boot_id=self.boot_id,
            notes=self.notes,
        )


class Registered(Outgoing):
    """The scheduler's answer: how often to be heard, and after how long silence a node counts as lost."""

    term: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    server_time_ms: int


class UseBody(Incoming):
    cpu_ms: int = Field(default=0, ge=0)
    memory_bytes: int = Field(default=0, ge=0)
    memory_peak_bytes: int = Field(default=0, ge=0)
    disk_bytes: int = Field(default=0, ge=0)
    gpu_memory_peak_mib: int = Field(default=0, ge=0)
    gpu_memory_mib: int = Field(default=0, ge=0)
    gpu_busy_ms: int = Field(default=0, ge=0)
    gpu_percent_milli: int = Field(default=0, ge=0)
    cpu_percent_milli: int = Field(default=0, ge=0)

    def to_use(self) -> Use:
        return Use(**self.model_dump())


class ReasonBody(Incoming):
    code: ReasonCode
    facts: dict[str, Fact] = {}

    def to_reason(self) -> Reason:
        return Reason(self.code, self.facts)

    @staticmethod
    def of(reason: Reason) -> ReasonBody:
        return ReasonBody(code=reason.code, facts=dict(reason.facts))


class ReportBody(Incoming):
    """One allocation's state as its node knows it. A final one is written to the node's disk before it is sent."""

    allocation: str
    token: int
    status: AllocationStatus
    reason: ReasonBody | None = None
    exit_code: int | None = None
    use: UseBody | None = None
    ready: bool = False


class ReportBatch(Incoming):
    reports: tuple[ReportBody, ...] = Field(min_length=1, max_length=10_000)


class ReportAnswer(Outgoing):
    """Allocations whose report was for another lease, or that the scheduler no longer knows: stop them and forget them."""

    stale: list[str] = []


class Heartbeat(Incoming):
    """I am alive, and this is what my workloads use now."""

    uses: dict[str, UseBody] = {}
    load_1m: float = 0.0
    free_disk_bytes: int = 0


class HeartbeatAnswer(Outgoing):
    term: int
    server_time_ms: int


class DrainAsked(Incoming):
    """A node's own wish to be emptied: it takes nothing new, and what runs goes on to its end."""

    reason: str = Field(default="", max_length=1000)


class DrainAnswer(Outgoing):
    draining: bool
    allocations: int = Field(description="what the node still holds")


class MountView(Outgoing):
    source: str
    target: str
    read_only: bool


class HealthView(Outgoing):
    path: str
    interval_ms: int
    timeout_ms: int
    failures_max: int


class GangView(Outgoing):
    """What all members of a gang are told alike: how many they are in this attempt, and where they meet."""

    members: int
    address: str
    port: int


class Lease(Outgoing):
    """The right to run one allocation, and all that is needed to do it."""

    allocation: str
    task: str
    token: int
    name: str
    project: str
    user: str
    attempt: int
    member: int
    members: int
    stop: bool = False
    """True: end it now (SIGTERM, `grace_ms`, SIGKILL) and report it as cancelled."""
    started: bool = False
    """True: an agent has reported it running. An agent that does not know it reports it lost; it never starts it again."""
    restartable: bool = True
    """True: the scheduler may start it elsewhere when this node is silent, so the agent fences it before that."""
    command: list[str]
    image: str | None = None
    env: dict[str, str] = {}
    env_profile: str | None = None
    working_dir: str | None = None
    warm_preload: list[str] | None = None
    mounts: list[MountView] = []
    output_path: str | None = None
    shm_bytes: int = 0
    cpu_milli: int
    memory_bytes: int
    disk_bytes: int
    control: bool = False
    devices: list[GrantView] = []
    ports: list[int] = []
    gang: GangView | None = None
    array: str | None = None
    array_index: int | None = None
    array_size: int = 0
    time_limit_ms: int | None = None
    gpu_idle_stop_ms: int | None = None
    """Stop it when none of its GPUs was used for so long; None: only tell."""
    gpu_visible_devices: VisibleDevices = VisibleDevices.UUID
    grace_ms: int = 10_000
    health: HealthView | None = None
    labels: dict[str, str] = {}


class Leases(Outgoing):
    """The whole list for one node at one revision; ask again with `after=revision`."""

    revision: int
    term: int
    leases: list[Lease] = []


def lease_of(task: Task, allocation: Allocation, restartable: bool) -> Lease:
    spec, gang = task.spec, allocation.gang
    health = spec.health
    stopping = allocation.status is AllocationStatus.STOPPING
    return Lease(
        allocation=allocation.id,
        task=task.id,
        token=allocation.token,
        name=spec.name,
        project=spec.project,
        user=spec.user,
        attempt=allocation.attempt,
        member=allocation.member,
        members=gang.members if gang is not None else 1,
        stop=stopping,
        started=allocation.started_at_ms is not None,
        restartable=restartable and spec.on_disconnect is OnDisconnect.STOP,
        command=list(spec.command),
        image=spec.image,
        env=dict(spec.env),
        env_profile=spec.env_profile,
        working_dir=spec.working_dir,
        warm_preload=list(spec.warm_preload) if spec.warm_preload is not None else None,
        mounts=[MountView(source=m.source, target=m.target, read_only=m.read_only) for m in spec.mounts],
        output_path=spec.output_path,
        shm_bytes=spec.shm_bytes,
        cpu_milli=allocation.held.cpu_milli,
        memory_bytes=allocation.held.memory_bytes,
        disk_bytes=allocation.held.disk_bytes,
        control=allocation.control,
        devices=[GrantView.of(grant) for grant in allocation.grants],
        ports=list(allocation.ports[: spec.request.ports]),
        gang=GangView(members=gang.members, address=gang.address, port=gang.port) if gang is not None else None,
        array=spec.array.id if spec.array is not None else None,
        array_index=task.array_index,
        array_size=spec.array.size if spec.array is not None else 0,
        time_limit_ms=spec.time_limit_ms,
        gpu_idle_stop_ms=spec.gpu_idle_stop_ms,
        gpu_visible_devices=spec.gpu_visible_devices,
        grace_ms=spec.grace_ms,
        health=HealthView(
            path=health.path,
            interval_ms=health.interval_ms,
            timeout_ms=health.timeout_ms,
            failures_max=health.failures_max,
        )
        if health
        else None,
        labels=dict(spec.labels),
    )
