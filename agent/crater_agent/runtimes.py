"""What the agent expects of a runtime, and the choice between those it has: processes, and containers for tasks with an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from crater_agent.cgroup import Counters
from crater_agent.cores import Cores
from crater_agent.reconcile import Exit, LeaseState, Phase
from crater_agent.records import Kept, Record
from crater_agent.workload import Workload
from crater_core.wire.agents import Lease


class Runtime(Protocol):
    name: str
    """As nodes declare it and records remember it."""

    def record(self, lease: Lease, now_ms: int) -> Record: ...

    async def start(self, lease: Lease, workload: Workload, lease_state: LeaseState) -> None:
        """Raises RuntimeFailed with the reason in words; nothing is left behind then."""
        ...

    def terminate(self, workload: Workload) -> None:
        """Ask it to end (SIGTERM). Returns at once."""
        ...

    def kill(self, workload: Workload) -> None:
        """SIGKILL to everything of it; called again until nothing lives. Returns at once."""
        ...

    def lives(self, workload: Workload) -> bool: ...

    def counters(self, workload: Workload) -> Counters | None:
        """What the kernel counts for it; None where nothing counts."""
        ...

    def pids(self, workload: Workload) -> set[int]:
        """Its living processes, as this machine numbers them; where no cgroup holds it, as of the last second."""
        ...

    def lost_devices(self, workload: Workload) -> bool:
        """Whether it can surely no longer open its GPUs, though nobody took them. May take a while: for a thread."""
        ...

    def disk_paths(self, workload: Workload) -> tuple[str, ...]:
        """The directories that count as its disk use."""
        ...

    async def clean(self, record: Record) -> bool:
        """Remove what is left of an ended one, but its logs; False when something could not be removed yet."""
        ...

    async def adopt(self, kept: Sequence[Kept], silent_ms: int) -> list[Workload]:
        """After a restart of the agent: what of these still runs or has ended. What never began is forgotten."""
        ...

    async def remove_strays(self, records: Iterable[Record]) -> list[str]:
        """End and remove what carries our mark and belongs to none of these; names what was found."""
        ...


class Runtimes:
    """The runtimes of this node by name; a task goes to the one that its image asks for, a record to the one it came from."""

    def __init__(self, *runtimes: Runtime, cores: Cores | None = None) -> None:
        self._cores = cores
        self._by_name = {runtime.name: runtime for runtime in runtimes}

    def for_lease(self, lease: Lease) -> Runtime:
        # The process runtime has the words for refusing an image where there is no other.
        return self._by_name.get("process" if lease.image is None else "docker") or self._by_name["process"]

    def of(self, record: Record) -> Runtime:
        # What a runtime that is switched off by now has left is at least cleaned up as far as any can.
        return self._by_name.get(record.runtime) or self._by_name["process"]

    async def adopt(self, kept: Sequence[Kept], silent_ms: int) -> list[Workload]:
        found: list[Workload] = []
        for name, runtime in self._by_name.items():
            found += await runtime.adopt([one for one in kept if one.record.runtime == name], silent_ms)
        for one in kept:
            if one.record.runtime not in self._by_name:
                workload = Workload(one.record, Phase.RUNNING, exit=Exit(known=False))
                if one.final is not None:
                    workload.conclude(one.final)
                found.append(workload)
        if self._cores is not None:
            # An owner may have ended meanwhile, of either runtime.
            await self._cores.share_the_rest()
        return found

    async def remove_strays(self, records: Sequence[Record]) -> list[str]:
        return [stray for runtime in self._by_name.values() for stray in await runtime.remove_strays(records)]
