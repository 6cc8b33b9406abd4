"""Which cores belong to one workload alone, and which are left for all the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from crater_core.wire.agents import Lease

log = logging.getLogger("crater.agent.cores")


class Cores:
    """Hands whole cores out, to tasks of every runtime of this node. A core has at most one owner; what has none is shared."""

    def __init__(self, online: Sequence[int], numa: Mapping[int, Sequence[int]] | None = None) -> None:
        self._online = sorted(online)
        self._numa = {core: node for node, cores in (numa or {}).items() for core in cores}
        self._owned: dict[str, tuple[int, ...]] = {}
        self.sharers: list[Callable[[], Awaitable[None]]] = []
        """One of each runtime: keeps its tasks that have no cores of their own on what is shared now."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Never empty: where every core has an owner, what asks for no cores of its own still has to run somewhere."""
        taken = {core for cores in self._owned.values() for core in cores}
        return tuple(core for core in self._online if core not in taken) or tuple(self._online)

    def take(self, owner: str, count: int, near: int | None = None) -> tuple[int, ...]:
        """`count` cores for `owner` alone, on one memory node where that is possible; empty when so many are not free."""
        taken = {core for cores in self._owned.values() for core in cores}
        chosen = choose([core for core in self._online if core not in taken], count, self._numa, near)
        if chosen:
            self._owned[owner] = chosen
        return chosen

    def take_for(self, lease: Lease, owner: str, near: int | None = None) -> tuple[int, ...]:
        """Cores of its own for a task that asks for whole ones; empty: it shares."""
        if not owner or lease.control or not lease.cpu_milli or lease.cpu_milli % 1000:
            return ()
        cores = self.take(owner, lease.cpu_milli // 1000, near)
        if not cores:
            log.warning("%s asks for whole cores, but not so many are free of other tasks: it shares them", lease.allocation)
        return cores

    async def share_the_rest(self) -> None:
        """Keep what has no cores of its own off those that have an owner. Call after every change, before the owner runs."""
        for share in self.sharers:
            await share()

    def keep(self, owner: str, cores: Sequence[int]) -> None:
        """It had them before this agent began."""
        self._owned[owner] = tuple(cores)

    def owns(self, owner: str) -> bool:
        return owner in self._owned

    def give_back(self, owner: str) -> bool:
        """True when it owned any."""
        return self._owned.pop(owner, None) is not None


def choose(free: Sequence[int], count: int, node_of: Mapping[int, int], near: int | None = None) -> tuple[int, ...]:
    """All from the node `near` or else from the fullest node that still has enough; across nodes only when none has."""
    if count > len(free):
        return ()
    nodes: dict[int, list[int]] = {}
    for core in sorted(free):
        nodes.setdefault(node_of.get(core, 0), []).append(core)
    fitting = sorted((cores for cores in nodes.values() if len(cores) >= count), key=len)
    if near in nodes and len(nodes[near]) >= count:
        fitting.insert(0, nodes[near])
    if fitting:
        return tuple(fitting[0][:count])
    # The emptiest first, so that few nodes are touched.
    spread = [core for cores in sorted(nodes.values(), key=len, reverse=True) for core in cores]
    return tuple(spread[:count])


def read_numa(sys: Path = Path("/sys/devices/system/node")) -> dict[int, tuple[int, ...]]:
    """Memory node to its cores; empty where the kernel does not say."""
    nodes = {path.name[4:]: path / "cpulist" for path in sys.glob("node[0-9]*")}
    return {int(name): parse(path.read_text("ascii")) for name, path in nodes.items() if path.exists()}


def parse(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5)."""
    cores: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cores += range(int(first), int(last or first) + 1)
    return tuple(cores)
