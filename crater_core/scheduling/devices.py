"""Which devices of the chosen node a task gets."""

from __future__ import annotations

from crater_core.model.allocation import DeviceGrant
from crater_core.model.node import SharingMode
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import NOBODY
from crater_core.scheduling.fits import Fits


def choose_devices(fits: Fits, row: int) -> list[tuple[int, DeviceGrant]]:
    """Slots with what to take of each. The row must fit.

    Whole devices: those that cannot be shared first, so that shareable ones stay for shares. A share: the fullest device
    that still has room, so that others stay whole, or the one that the strategy prefers. Equals go by index.
    """
    columns = fits.columns
    if fits.preferred is not None and fits.preferred[row] >= 0:
        slot = int(fits.preferred[row])
        return [(slot, _grant(fits, row, slot, int(columns.kind[row, slot])))]
    needs, devices = fits.device_needs, columns.devices[row]
    kinds: list[int] = columns.kind[row].tolist()
    compute, memory = columns.compute[row].tolist(), columns.gpu_memory[row].tolist()
    user: list[int] | None = columns.user[row].tolist() if fits.shape.user is not None else None
    # Shares of several devices take the emptiest: then the most copies fit beside each other.
    sign = 1 if fits.count == 1 else -1
    candidates: list[tuple[int, int, int]] = []
    for slot, device in enumerate(devices):
        need_compute, need_memory = needs[kinds[slot]]
        if compute[slot] < need_compute or memory[slot] < need_memory:
            continue
        if user is None:
            candidates.append((device.sharing is not SharingMode.EXCLUSIVE, 0, slot))
        elif user[slot] in (NOBODY, fits.user):
            candidates.append((sign * compute[slot], sign * memory[slot], slot))
    candidates.sort()
    assert len(candidates) >= fits.count, "devices are chosen only on a node that fits"
    return [(slot, _grant(fits, row, slot, kinds[slot])) for _, _, slot in candidates[: fits.count]]


def _grant(fits: Fits, row: int, slot: int, kind: int) -> DeviceGrant:
    device = fits.columns.devices[row][slot]
    compute, memory = fits.device_needs[kind]
    # A device given whole is nobody else's, whatever its mode: the task needs no share of it.
    sharing = device.sharing if fits.shape.user is not None or device.sharing is SharingMode.MIG else SharingMode.EXCLUSIVE
    assert compute <= MILLI, "a share never passes one device"
    return DeviceGrant(device.uuid, device.index, compute, memory, sharing, device.simulated)
