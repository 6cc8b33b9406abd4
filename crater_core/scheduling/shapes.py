"""What of a task matters to a node: tasks of one shape fit the same nodes with the same scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from crater_core.model.node import GpuDevice, PoolKind, SharingMode
from crater_core.model.resources import GpuRequest, Request
from crater_core.model.snapshot import Settings
from crater_core.model.task import Apart, TaskSpec, TaskType
from crater_core.model.units import MILLI

AFFINITY = "affinity"


@dataclass(frozen=True, slots=True)
class Shape:
    """The part of a spec that decides which nodes fit and how they score."""

    request: Request
    strategy: str
    control: bool = False
    runtime: str = "process"
    pools: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    user: str | None = None
    """Set for shares only: an MPS device serves one user id."""
    alone: bool = False
    """Members of a gang that must be on different nodes."""
    prefer: tuple[tuple[str, str], ...] = ()
    data: tuple[tuple[str, int], ...] = ()
    """Preferred labels, and bytes of data by node: for `affinity` only."""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Shapes are keys in every cycle, and hashing the request each time would cost more than the look-up.
        where = (self.runtime, self.pools, self.labels, self.prefer, self.data)
        fields = (self.request, self.strategy, self.control, self.user, self.alone, where)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    @property
    def gpu(self) -> GpuRequest | None:
        return self.request.gpu

    @property
    def shares(self) -> bool:
        return self.request.gpu is not None and not self.request.gpu.exclusive

    @property
    def counts_by_device(self) -> bool:
        """Compute follows from the device that gives it: a share by memory alone, or what may be a MIG slice."""
        gpu = self.gpu
        return gpu is not None and (gpu.may_be_slice or (not gpu.exclusive and not gpu.compute_milli))


ShapeFields = tuple[
    Request,
    str,
    bool,
    str,
    tuple[str, ...],
    tuple[tuple[str, str], ...],
    str | None,
    bool,
    tuple[tuple[str, str], ...],
    tuple[tuple[str, int], ...],
]


def shape_of(spec: TaskSpec, settings: Settings) -> Shape:
    return Shape(*shape_fields(spec, settings))


def shape_fields(spec: TaskSpec, settings: Settings) -> ShapeFields:
    """What the shape is made of, by which one that is known is found sooner than another is made."""
    control = spec.type is TaskType.CONTROL
    shared = spec.request.gpu is not None and not spec.request.gpu.exclusive
    strategy = strategy_of(spec, settings)
    gang = spec.members > 1
    return (
        # Every member has one port more than it asked for: the gang meets at that of member 0.
        replace(spec.request, ports=spec.request.ports + 1) if gang else spec.request,
        strategy,
        control,
        "process" if spec.image is None else "docker",
        tuple(sorted(set(spec.pools))) if spec.pools and not control else (),
        tuple(sorted(spec.node_labels.items())) if spec.node_labels else (),
        spec.user if shared else None,
        gang and spec.spread is Apart.REQUIRE,
        tuple(sorted(spec.prefer_labels.items())) if strategy == AFFINITY else (),
        tuple(sorted(spec.data_bytes.items())) if strategy == AFFINITY else (),
    )


def strategy_of(spec: TaskSpec, settings: Settings) -> str:
    """The task's own strategy, else that of the first of its pools that has one, else the scheduler's."""
    if spec.strategy is not None:
        return spec.strategy
    for pool in spec.pools:
        if pool in settings.pool_strategies:
            return settings.pool_strategies[pool]
    return settings.strategy


def type_matches(types: tuple[str, ...], device: GpuDevice) -> bool:
    """Whether a device is of one of the types: its `gpu_type` (with or without the vendor in front), model or MIG profile."""
    if not types:
        return True
    known = {device.gpu_type.lower(), device.gpu_type.lower().removeprefix("nvidia-"), device.model.lower(), device.mig_profile}
    return any(name.lower() in known for name in types)


def pool_allows(shape: Shape, pools: dict[str, PoolKind] | None, device: GpuDevice) -> bool:
    """A device counts when no GPU pool is named, or its own pool is. `pools` are those of the device's node."""
    named = [pool for pool in shape.pools if pools is not None and pools.get(pool) is PoolKind.GPU]
    return not named or device.pool in named


def need_of_device(gpu: GpuRequest, device: GpuDevice) -> tuple[int, int] | None:
    """Compute in thousandths and memory in MiB to take of this device for one share; None when it cannot give that.

    A memory-only share takes the same fraction of compute, rounded up; a compute-only share the same fraction of memory. Shares
    of several devices are none of MPS devices: a program has one MPS daemon, and each daemon has one device.
    """
    if gpu.exclusive:
        return (MILLI, device.memory_mib) if _of_the_form(gpu, device) else None
    if not device.shareable or (gpu.count > 1 and device.sharing is SharingMode.MPS):
        return None
    compute, memory = gpu.compute_milli, gpu.memory_mib
    if not compute and device.memory_mib:
        compute = min(MILLI, -(-memory * MILLI // device.memory_mib))
    if not memory:
        memory = device.memory_mib * compute // MILLI
    # More memory is given out than there is in all, never to one task: it could not have it.
    if memory > device.memory_mib or compute > MILLI:
        return None
    return max(1, compute), memory


def _of_the_form(gpu: GpuRequest, device: GpuDevice) -> bool:
    """A card, or a slice. A slice is a whole device too, but not what "one GPU" means: only who names it gets one."""
    if device.sharing is not SharingMode.MIG:
        return gpu.mig_profile is None
    return gpu.mig_profile in ("any", device.mig_profile) or any(
        name.lower() in (device.mig_profile, device.model.lower()) for name in gpu.types
    )


def given_whole(types: tuple[str, ...], device: GpuDevice) -> bool:
    """Whether it is a whole GPU of one of the types, or a slice that they name."""
    return type_matches(types, device) and _of_the_form(GpuRequest(1, types=types), device)


def only_by_mps(shape: Shape, device: GpuDevice, pools: dict[str, PoolKind] | None) -> bool:
    """Whether the device could give one of the several shares that are asked for, were it not shared by MPS."""
    gpu = shape.gpu
    if gpu is None or gpu.exclusive or gpu.count == 1 or device.sharing is not SharingMode.MPS:
        return False
    mine = type_matches(gpu.types, device) and pool_allows(shape, pools, device)
    return mine and need_of_device(replace(gpu, count=1), device) is not None
