"""Which living processes belong to a workload, where no cgroup says so: by session, ancestry and environment marker."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
SETTLED_S = 2.0
MARKER = "CRATER_SCRATCH_DIR"
"""Its value names one allocation of one agent, whatever else runs on the machine."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    session: int
    start_ticks: int
    state: str
    cpu_ms: int
    """Its own and that of children it has waited for."""
    memory_bytes: int


def read_process(pid: int | str, proc: Path = Path("/proc")) -> Process | None:
    try:
        name, _, rest = (proc / str(pid) / "stat").read_bytes().rpartition(b")")
    except OSError:
        return None
    f = rest.split()
    cpu_ticks = sum(int(f[i]) for i in (11, 12, 13, 14))
    return Process(
        pid=int(name.split(b" ", 1)[0]),
        parent=int(f[1]),
        session=int(f[3]),
        start_ticks=int(f[19]),
        state=f[0].decode(),
        cpu_ms=cpu_ticks * 1000 // TICKS,
        memory_bytes=max(0, int(f[21])) * PAGE_BYTES,
    )


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process still runs: a pid that was given to another one does not count, nor does a zombie."""
    process = read_process(pid)
    return process is not None and process.start_ticks == start_ticks and process.state not in "ZX"


class Trees:
    """Looks through /proc for the processes of several workloads at once; remembers the markers it has read."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._markers: dict[tuple[int, int], str] = {}
        self._members: dict[str, set[tuple[int, int]]] = {}

    def find(self, roots: dict[str, tuple[int, int]]) -> dict[str, list[Process]]:
        """`roots`: marker to (pid, start ticks) of the first process. A process once found stays found while it lives."""
        processes = {process.pid: process for process in self._all()}
        living = {(p.pid, p.start_ticks) for p in processes.values()}
        self._markers = {key: marker for key, marker in self._markers.items() if key in living}
        owner: dict[int, str] = {}
        for marker, (pid, start_ticks) in roots.items():
            for known in self._members.get(marker, set()) & living:
                owner[known[0]] = marker
            if pid in processes and processes[pid].start_ticks == start_ticks:
                owner[pid] = marker
        # A session is known by its first process's pid, unless that pid now names another process.
        sessions = {
            pid: marker
            for marker, (pid, start_ticks) in roots.items()
            if pid not in processes or processes[pid].start_ticks == start_ticks
        }
        # Parents before children: a child's pid may be lower than its parent's, so start times give the order.
        for process in sorted(processes.values(), key=lambda p: p.start_ticks):
            marker = owner.get(process.pid) or sessions.get(process.session) or owner.get(process.parent)
            marker = marker or self._marker_of(process, roots)
            if marker is not None:
                owner[process.pid] = marker
        found: dict[str, list[Process]] = {marker: [] for marker in roots}
        for pid, marker in owner.items():
            if processes[pid].state not in "ZX":
                found[marker].append(processes[pid])
        for marker, members in found.items():
            self._members[marker] = {(p.pid, p.start_ticks) for p in members}
            if not members:
                del self._members[marker]
        return found

    def known(self, marker: str) -> set[int]:
        """Pids of a workload as of the last `find`."""
        return {pid for pid, _ in self._members.get(marker, ())}

    def marked(self, prefix: str) -> list[tuple[str, Process]]:
        """Every process whose marker begins with `prefix`, with the marker."""
        pairs = [(self._read_marker(process), process) for process in self._all()]
        return [(marker, process) for marker, process in pairs if marker.startswith(prefix)]

    def _all(self) -> list[Process]:
        names = [name for name in os.listdir(self._proc) if name.isdigit()]  # noqa: PTH208 (names, not paths)
        return [process for name in names if (process := read_process(name, self._proc)) is not None]

    def _marker_of(self, process: Process, roots: dict[str, tuple[int, int]]) -> str | None:
        marker = self._read_marker(process)
        return marker if marker in roots else None

    def _read_marker(self, process: Process) -> str:
        key = (process.pid, process.start_ticks)
        known = self._markers.get(key)
        if known is None:
            known = self._from_environment(process.pid)
            # A process that was just forked and has not yet run its program shows its parent's environment.
            if known or time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / TICKS > SETTLED_S:
                self._markers[key] = known
        return known

    def _from_environment(self, pid: int) -> str:
        try:
            environment = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            return ""
        prefix = f"{MARKER}=".encode()
        found = next((entry for entry in environment.split(b"\0") if entry.startswith(prefix)), b"")
        return found[len(prefix) :].decode(errors="replace")


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        # Looked at again: between finding and now the pid may have been given to another process.
        now = read_process(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
