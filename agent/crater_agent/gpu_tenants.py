"""Whose the processes on a device are, and what each task uses of it. Pure: the agent's view of /proc and NVML goes in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from crater_agent.gpu_faults import Fault
from crater_agent.gpu_reading import Glance, Holder, Reading

HELD_MIB = 512
"""A card that nobody uses may keep as much: contexts of the driver itself, a console."""


@dataclass(frozen=True, slots=True)
class Stranger:
    """A process on a device that belongs to no task of this agent."""

    pid: int
    memory_mib: int
    user: str
    command: str


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What is on a device: MiB by allocation (of those with processes there), and everybody else."""

    memory_mib: Mapping[str, int]
    strangers: tuple[Stranger, ...] = ()
    ghosts: tuple[Holder, ...] = ()
    """Processes that have ended, and whose memory the driver has not given back."""


def tenancy(
    glance: Glance,
    owners: Mapping[int, str],
    alone: str | None,
    strangers: Mapping[int, tuple[str, str]],
    gone: Collection[int] = (),
) -> Tenancy | None:
    """`owners`: allocation by pid; `alone`: the one allocation that holds the whole device, if one does; `strangers`: user and
    command of the other living processes that compute; `gone`: pids that no process has any more. None where the driver does
    not say who is there.

    A task's memory is the sum over its processes. Where the driver keeps a process's memory to itself, a task that is alone has
    all that is used.
    """
    if glance.holders is None:
        return Tenancy({alone: glance.memory_used_mib}) if alone is not None and glance.memory_used_mib is not None else None
    memory: dict[str, int] = {}
    unsaid = False
    for holder in glance.holders:
        if holder.pid in owners:
            allocation = owners[holder.pid]
            unsaid |= holder.memory_mib is None
            memory[allocation] = memory.get(allocation, 0) + (holder.memory_mib or 0)
    if unsaid and alone is not None and glance.memory_used_mib is not None:
        memory[alone] = max(memory.get(alone, 0), glance.memory_used_mib)
    others = tuple(
        Stranger(holder.pid, holder.memory_mib or 0, *strangers[holder.pid])
        for holder in glance.holders
        if holder.computes and holder.pid in strangers
    )
    ghosts = tuple(holder for holder in glance.holders if holder.computes and holder.pid in gone)
    return Tenancy(memory, others, ghosts)


def faults_of_tenancy(glance: Glance, found: Tenancy | None, occupied: bool, ignored: Iterable[str] = ()) -> tuple[Fault, ...]:
    """What keeps a device from being given out although it is well. `occupied`: a task of this agent has it, or parts of it."""
    faults: list[Fault] = []
    if found is not None and found.strangers:
        faults.append(Fault("foreign", "in use from outside Crater by " + ", ".join(map(_shown, found.strangers))))
    elif found is not None and found.ghosts:
        pids = ", ".join(str(holder.pid) for holder in found.ghosts)
        faults.append(Fault("held", f"memory is held by pid {pids}, which has ended"))
    elif not occupied and not glance.holders and (glance.memory_used_mib or 0) > HELD_MIB:
        faults.append(Fault("held", f"{glance.memory_used_mib} MiB of its memory are held though no process is on it"))
    return tuple(fault for fault in faults if fault.code not in tuple(ignored))


def _shown(stranger: Stranger) -> str:
    # Without its memory, which changes: news of it is told to the scheduler each time that the words change.
    return f"pid {stranger.pid} of {stranger.user} ({stranger.command})"


def shares_of_use(reading: Reading, owners: Mapping[int, str], alone: str | None) -> Mapping[str, int] | None:
    """Percent of the device that each allocation computed for; those with none are left out. Never more together than the
    device itself was used: processes are sampled one by one, so their sum may be above it, and is scaled down then.

    None where it cannot be told.
    """
    use = reading.glance.use_percent
    if reading.process_use is None:
        return {alone: use} if alone is not None and use is not None else None
    raw: dict[str, int] = {}
    for pid, percent in reading.process_use.items():
        if pid in owners and percent:
            raw[owners[pid]] = raw.get(owners[pid], 0) + percent
    others = sum(percent for pid, percent in reading.process_use.items() if pid not in owners)
    total, most = sum(raw.values()) + others, 100 if use is None else use
    if alone is not None and not others and use is not None:
        return {alone: use} if use else {}
    return raw if total <= most else {allocation: percent * most // total for allocation, percent in raw.items()}


def any_use(reading: Reading, pids: Iterable[int], alone: bool) -> bool | None:
    """Whether a task computed at all since the last reading, by the processes it has there; None where it cannot be told."""
    use, by_process = reading.use_percent_max, reading.process_use
    if by_process is not None and any(by_process.get(pid, 0) for pid in pids):
        return True
    if use == 0:
        return False
    if alone:
        return None if use is None else True
    return None if by_process is None else False
