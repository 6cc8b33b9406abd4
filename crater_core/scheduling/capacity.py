"""How many copies of a shape an empty node could hold: what bounds a gang."""

from __future__ import annotations

from crater_core.model.node import GpuDevice, Node
from crater_core.model.resources import GpuRequest
from crater_core.model.units import MILLI
from crater_core.scheduling.shapes import Shape, need_of_device, pool_allows, type_matches

UNBOUNDED = 1_000_000


def copies_on_empty(shape: Shape, node: Node) -> int:
    """Lost and cordoned nodes count as any other; unwell devices count as well ones."""
    copies = _copies(shape, node)
    return min(copies, 1) if shape.alone else copies


def _copies(shape: Shape, node: Node) -> int:
    request, give = shape.request, node.allocatable
    if shape.control:
        return min(node.control.slots, _times(node.control.memory_bytes, request.memory_bytes))
    copies = min(
        _times(give.cpu_milli, request.cpu_milli),
        _times(give.memory_bytes, request.memory_bytes),
        _times(give.disk_bytes, request.disk_bytes),
        _times(node.port_count, request.ports),
    )
    if request.gpu is None:
        return copies
    usable = [d for d in node.devices if type_matches(request.gpu.types, d) and pool_allows(shape, dict(node.pools), d)]
    return min(copies, _copies_on_devices(request.gpu, usable))


def _times(has: int, wanted: int) -> int:
    return has // wanted if wanted else UNBOUNDED


def _copies_on_devices(gpu: GpuRequest, devices: list[GpuDevice]) -> int:
    """A device serves so many copies, and one copy takes `count` different devices."""
    shares: list[int] = []
    for device in devices:
        need = need_of_device(gpu, device)
        if need is not None:
            compute, memory = need
            shares.append(1 if gpu.exclusive else min(MILLI // compute, _times(device.allocatable_memory_mib, memory)))
    copies = sum(shares) // gpu.count
    while copies and sum(min(share, copies) for share in shares) < copies * gpu.count:
        copies -= 1
    return copies
