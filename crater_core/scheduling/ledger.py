"""Free room while a plan is made: take, and undo back to a mark. The columns show the snapshot again after the cycle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

from crater_core.model.allocation import DeviceGrant, Placement
from crater_core.model.node import SharingMode
from crater_core.scheduling.columns import Columns
from crater_core.scheduling.devices import choose_devices
from crater_core.scheduling.endings import Ending
from crater_core.scheduling.fits import Fits


@dataclass(frozen=True, slots=True)
class Taken:
    """Room taken on a row in this cycle: of the columns, of device slots, and until when, where that can be foretold."""

    fits: Fits
    devices: list[tuple[int, DeviceGrant]]
    ending: Ending | None


class Ledger:
    """Takes room for placements on the columns. Everything it touches is read anew before the next decision."""

    def __init__(self, columns: Columns, revision: int = 0) -> None:
        self.columns = columns
        self._revision = revision
        self.taken: dict[int, list[Taken]] = defaultdict(list)
        """What was placed in this cycle, by row."""
        self._undo: list[Callable[[], None]] = []

    def mark(self) -> int:
        return len(self._undo)

    def rollback(self, mark: int) -> None:
        while len(self._undo) > mark:
            self._undo.pop()()

    def take(self, fits: Fits, row: int, task: str, member: int, ending: Ending | None = None) -> Placement:
        """Place one member on a row that fits: choose devices and ports, and take them."""
        columns = self.columns
        chosen = choose_devices(fits, row) if fits.count else []
        ports = self._free_ports(row, fits.shape.request.ports, task) if fits.shape.request.ports else ()
        serves = fits.user if fits.shape.user is not None else None
        users = [int(columns.user[row, slot]) for slot, _ in chosen] if serves is not None else []
        for column, need in fits.needs:
            columns.free[row, column] -= need
        for slot, grant in chosen:
            columns.compute[row, slot] -= grant.compute_milli
            columns.gpu_memory[row, slot] -= grant.memory_mib
            columns.compute_free[row] -= grant.compute_milli
            if serves is not None and columns.devices[row][slot].sharing is SharingMode.MPS:
                columns.user[row, slot] = serves
        columns.ports_used[row].update(ports)
        columns.limited[row] += ending is not None
        columns.touch(row)
        self.taken[row].append(Taken(fits, chosen, ending))

        def undo() -> None:
            for column, need in fits.needs:
                columns.free[row, column] += need
            for slot, grant in chosen:
                columns.compute[row, slot] += grant.compute_milli
                columns.gpu_memory[row, slot] += grant.memory_mib
                columns.compute_free[row] += grant.compute_milli
            for (slot, _), user in zip(chosen, users, strict=False):
                columns.user[row, slot] = user
            columns.ports_used[row].difference_update(ports)
            columns.limited[row] -= ending is not None
            columns.touch(row)
            self.taken[row].pop()

        self._undo.append(undo)
        return Placement(task, member, columns.names[row], tuple(grant for _, grant in chosen), ports)

    def _free_ports(self, row: int, count: int, task: str) -> tuple[int, ...]:
        """Looked for from another place each time: one that a stranger on the node holds is not given again and again."""
        node, used = self.columns.nodes[row], self.columns.ports_used[row]
        start = crc32(f"{task} {self._revision}".encode()) % max(1, node.port_count)
        turned = (node.port_first + (start + step) % node.port_count for step in range(node.port_count))
        free = (port for port in turned if port not in used)
        return tuple(sorted(port for port, _ in zip(free, range(count), strict=False)))
