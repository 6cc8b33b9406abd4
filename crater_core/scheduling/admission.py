"""The yes or no at submit: wrong values, names nobody knows, and requests that could never run."""

from __future__ import annotations

from dataclasses import dataclass

from crater_core.model.node import GpuDevice, Node
from crater_core.model.plan import Admission, Admitted, Refused
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Snapshot
from crater_core.model.task import Apart, TaskSpec, TaskType
from crater_core.model.units import MILLI
from crater_core.scheduling.capacity import copies_on_empty
from crater_core.scheduling.diagnosis import none_of_the_type
from crater_core.scheduling.fits import profile_fits
from crater_core.scheduling.memory import memory_of
from crater_core.scheduling.quotas import QUOTA_RESOURCES, applicable, held_of, limits_of, listed
from crater_core.scheduling.shapes import Shape, need_of_device, only_by_mps, pool_allows, shape_of, type_matches
from crater_core.scheduling.strategies import STRATEGIES

_FIELDS = {
    "gpu": "resources.gpu",
    "gpu_memory": "resources.gpu_memory",
    "cpu": "resources.cpu",
    "memory": "resources.memory",
    "disk": "resources.disk",
    "ports": "ports",
}


def admit(spec: TaskSpec, snapshot: Snapshot) -> Admission:
    """Refuse what is wrong or could never run, naming the field to change; everything else may wait.

    Nodes that are lost or cordoned count as known. With no node at all nothing is too large yet.
    """
    return (
        _valid(spec)
        or _names_known(spec, snapshot)
        or _within_nodes(spec, snapshot)
        or _within_cluster(spec, snapshot)
        or _within_quota(spec, snapshot)
        or _YES
    )


_YES = Admitted()


def _bad(field: str, why: str) -> Refused:
    return Refused(Reason.of(ReasonCode.BAD_REQUEST, why=why), field)


def _valid(spec: TaskSpec) -> Refused | None:
    request = spec.request
    if not 0 <= spec.priority <= 100:
        return _bad("priority", f"priority must be between 0 and 100, found {spec.priority}")
    for field, amount in (
        ("resources.cpu", request.cpu_milli),
        ("resources.memory", request.memory_bytes),
        ("resources.disk", request.disk_bytes),
        ("ports", request.ports),
        ("grace", spec.grace_ms),
    ):
        if amount < 0:
            return _bad(field, f"{field} must not be negative, found {amount}")
    if spec.time_limit_ms is not None and spec.time_limit_ms <= 0:
        return _bad("time_limit", f"time_limit must be more than zero, found {spec.time_limit_ms} ms")
    if not spec.command and spec.image is None:
        return _bad("command", "command is missing: a program with its arguments, or an image that has its own")
    if spec.members < 1:
        return _bad("members", f"members must be at least 1, found {spec.members}")
    if not 1 <= spec.members_fewest <= spec.members:
        why = f"members_min must be between 1 and members_max ({spec.members}), found {spec.members_min}"
        return _bad("members_min", why)
    if spec.anti_affinity is not Apart.NO and spec.group is None:
        return _bad("anti_affinity", "anti_affinity keeps the tasks of one group apart: give the task a group")
    if spec.members > 1 and spec.service is not None:
        return _bad("members", "a replica of a service is one task: ask for more replicas")
    if spec.type is TaskType.CONTROL and request.gpu is not None:
        return _bad("resources.gpu", "a control task runs on a node's control share, which has no GPU")
    return _valid_gpu(request.gpu) if request.gpu is not None else None


def _valid_gpu(gpu: GpuRequest) -> Refused | None:
    if gpu.count < 1:
        return _bad("resources.gpu", f"the number of GPUs must be at least 1, found {gpu.count}")
    if gpu.compute_milli < 0 or gpu.memory_mib < 0:
        return _bad("resources.gpu", "a share must not be negative")
    if gpu.exclusive and (gpu.compute_milli != MILLI or gpu.memory_mib):
        return _bad("resources.gpu", "a whole device comes with all its compute and memory")
    if not gpu.exclusive and not gpu.compute_milli and not gpu.memory_mib:
        return _bad("resources.gpu", "a share needs gpu, gpu_memory or both")
    if gpu.compute_milli > MILLI:
        return _bad("resources.gpu", f"a share is at most one device, found {gpu.compute_milli / MILLI}")
    return None


def _names_known(spec: TaskSpec, snapshot: Snapshot) -> Refused | None:
    pools = memory_of(snapshot).pools(snapshot)
    for pool in spec.pools:
        if snapshot.nodes and pool not in pools:
            return Refused(Reason.of(ReasonCode.UNKNOWN_POOL, pool=pool, known=listed(pools)), "pools")
    policies, named = snapshot.policies, spec.quota_policy
    if named is not None and named not in policies:
        reason = Reason.of(ReasonCode.UNKNOWN_QUOTA_POLICY, policy=named, known=listed(policies))
        return Refused(reason, "quota_policy")
    if named is not None and policies[named].projects and spec.project not in policies[named].projects:
        why = f"quota policy {named} is for the projects {listed(policies[named].projects)}, not for {spec.project}"
        return _bad("quota_policy", why)
    if spec.strategy is not None and spec.strategy not in STRATEGIES:
        reason = Reason.of(ReasonCode.UNKNOWN_STRATEGY, strategy=spec.strategy, known=listed(STRATEGIES))
        return Refused(reason, "strategy")
    return None


def _within_cluster(spec: TaskSpec, snapshot: Snapshot) -> Refused | None:
    """A gang has to fit the empty cluster. Nodes of the wrong kind hold no member; with none of the right kind it may wait."""
    if spec.members_fewest == 1 or not snapshot.nodes:
        return None
    shape, most = shape_of(spec, snapshot.settings), 0
    for node in snapshot.nodes.values():
        most += copies_on_empty(shape, node) if profile_fits(shape, node) else 0
        if most >= spec.members_fewest:
            return None
    if not most:
        return None
    return Refused(Reason.of(ReasonCode.LARGER_THAN_CLUSTER, members=spec.members_fewest, largest=most), _members(spec))


def _members(spec: TaskSpec) -> str:
    return "members" if spec.members_min is None else "members_min"


def _within_quota(spec: TaskSpec, snapshot: Snapshot) -> Refused | None:
    if spec.type is TaskType.CONTROL:
        return None
    wanted = held_of(spec.request.amounts.times(spec.members_fewest))
    for policy in applicable(snapshot.policies, spec.project, spec.quota_policy):
        for limits, label in ((policy.limits, policy.name), (policy.user_limits, f"{policy.name} (for each user)")):
            for resource, limit, want in zip(QUOTA_RESOURCES, limits_of(limits), wanted, strict=False):
                if limit is not None and want > limit:
                    reason = Reason.of(ReasonCode.LARGER_THAN_QUOTA, policy=label, resource=resource, wanted=want, limit=limit)
                    return Refused(reason, _FIELDS[resource])
    return None


@dataclass(frozen=True, slots=True)
class _Most:
    """What a node has of one thing, at best, against what is asked."""

    resource: str
    wanted: int
    has: int


def _within_nodes(spec: TaskSpec, snapshot: Snapshot) -> Refused | None:
    shape = shape_of(spec, snapshot.settings)
    return memory_of(snapshot).too_large(snapshot, shape, lambda: _larger_than_any(shape, snapshot))


def _larger_than_any(shape: Shape, snapshot: Snapshot) -> Refused | None:
    """Refused when nodes of the kind asked for are known and none of them could hold it, even empty."""
    best: tuple[tuple[bool, int, int], str, _Most] | None = None
    for name, node in sorted(snapshot.nodes.items()):
        if not profile_fits(shape, node):
            continue
        devices = [device for device in node.devices if _usable(shape, node, device)]
        if shape.gpu is not None and not devices:
            continue
        short = [most for most in _at_best(shape, node, devices) if most.has < most.wanted]
        if not short:
            return None
        first = short[0]
        # Nodes with none of what is asked for come last: they say least.
        rank = (first.resource == "gpu" and not first.has, len(short), -first.has)
        if best is None or rank < best[0]:
            best = (rank, name, first)
    if best is None:
        return None
    (none, _, _), name, most = best
    if most.resource.startswith("gpu") and (reason := _only_by_mps(shape, snapshot)):
        return Refused(reason, "resources.gpu_devices")
    if none and shape.gpu is not None:
        there = [device for node in snapshot.nodes.values() if profile_fits(shape, node) for device in node.devices]
        field = "mig_profile" if shape.gpu.mig_profile is not None else "gpu_type" if shape.gpu.types else "gpu"
        return Refused(none_of_the_type(shape.gpu, there), f"resources.{field}")
    reason = Reason.of(ReasonCode.LARGER_THAN_ANY_NODE, resource=most.resource, wanted=most.wanted, largest=most.has, node=name)
    return Refused(reason, _FIELDS[most.resource])


def _only_by_mps(shape: Shape, snapshot: Snapshot) -> Reason | None:
    """Why shares of several devices are not to be had, where MPS devices could give them one by one."""
    nodes = (node for node in snapshot.nodes.values() if profile_fits(shape, node))
    devices = sum(only_by_mps(shape, device, dict(node.pools)) for node in nodes for device in node.devices)
    return Reason.of(ReasonCode.MPS_ONE_GPU, count=shape.gpu.count, devices=devices) if shape.gpu and devices else None


def _usable(shape: Shape, node: Node, device: GpuDevice) -> bool:
    return shape.gpu is not None and type_matches(shape.gpu.types, device) and pool_allows(shape, dict(node.pools), device)


def _at_best(shape: Shape, node: Node, devices: list[GpuDevice]) -> list[_Most]:
    """In the order in which a shortage is told."""
    request, give = shape.request, node.allocatable
    if shape.control:
        return [_Most("memory", request.memory_bytes, node.control.memory_bytes)]
    found: list[_Most] = []
    if request.gpu is not None:
        found.append(_gpu_at_best(request.gpu, devices))
    return [
        *found,
        _Most("cpu", request.cpu_milli, give.cpu_milli),
        _Most("memory", request.memory_bytes, give.memory_bytes),
        _Most("disk", request.disk_bytes, give.disk_bytes),
        _Most("ports", request.ports, node.port_count),
    ]


def _gpu_at_best(gpu: GpuRequest, devices: list[GpuDevice]) -> _Most:
    """A share that is too large for every device in memory is told in memory, anything else in devices."""
    fit = sum(need_of_device(gpu, device) is not None for device in devices)
    shareable = [device for device in devices if need_of_device(GpuRequest(1, 1, exclusive=False), device) is not None]
    largest = max((device.memory_mib for device in shareable), default=0)
    if not gpu.exclusive and not fit and shareable and largest < gpu.memory_mib:
        return _Most("gpu_memory", gpu.memory_mib, largest)
    unit = gpu.compute_milli or MILLI
    return _Most("gpu", gpu.count * unit, fit * unit)
