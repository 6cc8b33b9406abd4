"""Which devices of the chosen node a task gets."""

from __future__ import annotations

from crater_core.model.allocation import DeviceGrant
from crater_core.model.node import GpuDevice, SharingMode
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import NOBODY
from crater_core.scheduling.fits import Fits


def choose_devices(fits: Fits, row: int) -> list[tuple[int, DeviceGrant]]:
    """Slots with what to take of each. The row must fit.

    Whole devices: the smallest slices first, where slices will do; of cards those that cannot be shared first, so that
    shareable ones stay for shares. A share: the fullest device that still has room, so that others stay whole, or the one that
    the strategy prefers. Equals go by index; of several whole devices, those that are joined best.
    """
    columns = fits.columns
    if fits.preferred is not None and fits.preferred[row] >= 0:
        slot = int(fits.preferred[row])
        return [(slot, _grant(fits, row, slot, int(columns.kind[row, slot])))]
    needs, count, kinds = fits.device_needs, fits.count, columns.kind[row].tolist()
    compute, memory = columns.room[:, :, row].tolist()
    chosen = [
        slot
        for slot in columns.whole_order[row]
        if compute[slot] >= needs[kinds[slot]][0] and memory[slot] >= needs[kinds[slot]][1]
    ]
    if fits.shape.user is None:
        if 1 < count < len(chosen):
            chosen = closest(columns.devices[row], chosen, count)
    else:
        user: list[int] = columns.user[row].tolist()
        # Shares of several devices take the emptiest: then the most copies fit beside each other.
        sign = 1 if count == 1 else -1
        fullest = sorted(
            (sign * compute[slot], sign * memory[slot], slot) for slot in chosen if user[slot] in (NOBODY, fits.user)
        )
        chosen = [slot for _, _, slot in fullest]
    assert len(chosen) >= count, "devices are chosen only on a node that fits"
    return [(slot, _grant(fits, row, slot, kinds[slot])) for slot in sorted(chosen[:count])]


def closest(devices: list[GpuDevice], slots: list[int], count: int) -> list[int]:
    """So many of the slots that are joined best: by NVLink, else on one NUMA node. Without either, the first ones.

    Grown from every slot in turn; the order of `slots` decides between equals.
    """
    if not any(devices[slot].links or devices[slot].numa_node is not None for slot in slots):
        return slots[:count]
    best: tuple[int, list[int]] = (-1, [])
    for first in slots:
        chosen, closeness = [first], 0
        while len(chosen) < count:
            joined = {slot: sum(_joined(devices[slot], devices[one]) for one in chosen) for slot in slots if slot not in chosen}
            nearest = max(joined, key=lambda slot: joined[slot])
            closeness += joined[nearest]
            chosen.append(nearest)
        if closeness > best[0]:
            best = (closeness, chosen)
    return best[1]


def _joined(one: GpuDevice, other: GpuDevice) -> int:
    linked = other.uuid in one.links or one.uuid in other.links
    same_numa = one.numa_node is not None and one.numa_node == other.numa_node
    return 100 * linked + same_numa


def _grant(fits: Fits, row: int, slot: int, kind: int) -> DeviceGrant:
    device = fits.columns.devices[row][slot]
    compute, memory = fits.device_needs[kind]
    # A device given whole is nobody else's, whatever its mode: the task needs no share of it.
    sharing = device.sharing if fits.shape.user is not None or device.sharing is SharingMode.MIG else SharingMode.EXCLUSIVE
    assert compute <= MILLI, "a share never passes one device"
    return DeviceGrant(device.uuid, device.index, compute, memory, sharing, device.simulated, device.card_milli)
