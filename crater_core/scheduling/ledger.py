"""Free room while a plan is made: take, and undo back to a mark. The columns show the snapshot again after the cycle."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple
from zlib import crc32

from crater_core.model.allocation import DeviceGrant, Placement
from crater_core.model.node import SharingMode
from crater_core.scheduling.columns import Columns
from crater_core.scheduling.devices import choose_devices
from crater_core.scheduling.endings import Ending
from crater_core.scheduling.fits import Fits


class Taken(NamedTuple):
    """Room taken on a row in this cycle: of the columns, of device slots, and until when, where that can be foretold."""

    fits: Fits
    row: int
    devices: list[tuple[int, DeviceGrant]]
    users: list[int]
    """Whom the devices served before, where that may have changed."""
    ports: tuple[int, ...]
    ending: Ending | None


class Ledger:
    """Takes room for placements on the columns. Everything it touches is read anew before the next decision."""

    def __init__(self, columns: Columns, revision: int = 0) -> None:
        self.columns = columns
        self._revision = revision
        self.taken: dict[int, list[Taken]] = defaultdict(list)
        """What was placed in this cycle, by row."""
        self._all: list[Taken] = []

    def mark(self) -> int:
        return len(self._all)

    def rollback(self, mark: int) -> None:
        while len(self._all) > mark:
            one = self._all.pop()
            self.taken[one.row].pop()
            self._move(one, -1)
            self.columns.ports_used[one.row].difference_update(one.ports)
            for (slot, _), user in zip(one.devices, one.users, strict=False):
                self.columns.user[one.row, slot] = user

    def take(self, fits: Fits, row: int, task: str, member: int, ending: Ending | None = None) -> Placement:
        """Place one member on a row that fits: choose devices and ports, and take them."""
        columns, request = self.columns, fits.shape.request
        chosen = choose_devices(fits, row) if fits.count else []
        ports = self._free_ports(row, request.ports, task) if request.ports else ()
        users = self._serve(fits, row, chosen) if columns.mps and fits.shape.user is not None else []
        if ports:
            columns.ports_used[row].update(ports)
        one = Taken(fits, row, chosen, users, ports, ending)
        self._move(one, 1)
        self.taken[row].append(one)
        self._all.append(one)
        return Placement(task, member, columns.names[row], tuple([grant for _, grant in chosen]), ports)

    def _move(self, one: Taken, sign: int) -> None:
        """Take what is counted off the columns, or give it back."""
        columns, row, compute = self.columns, one.row, 0
        for column, need in one.fits.needs:
            columns.free[row, column] -= sign * need
        for slot, grant in one.devices:
            columns.compute[row, slot] -= sign * grant.compute_milli
            columns.gpu_memory[row, slot] -= sign * grant.memory_mib
            compute += grant.compute_milli
        if compute:
            columns.compute_free[row] -= sign * compute
        if one.ending is not None:
            columns.limited[row] += sign
        columns.touch(row)

    def _serve(self, fits: Fits, row: int, chosen: list[tuple[int, DeviceGrant]]) -> list[int]:
        """MPS devices serve the shape's user now; whom they served before."""
        columns = self.columns
        before = [columns.user.item(row, slot) for slot, _ in chosen]
        for slot, _ in chosen:
            if columns.devices[row][slot].sharing is SharingMode.MPS:
                columns.user[row, slot] = fits.user
        return before

    def _free_ports(self, row: int, count: int, task: str) -> tuple[int, ...]:
        """Looked for from another place each time: one that a stranger on the node holds is not given again and again."""
        node, used = self.columns.nodes[row], self.columns.ports_used[row]
        start = crc32(f"{task} {self._revision}".encode()) % max(1, node.port_count)
        turned = (node.port_first + (start + step) % node.port_count for step in range(node.port_count))
        free = (port for port in turned if port not in used)
        return tuple(sorted(port for port, _ in zip(free, range(count), strict=False)))
