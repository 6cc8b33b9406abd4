"""Follows a container from its start to its end: its output, its processes and counters, its signals, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from crater_agent import cgroup, proctree
from crater_agent.cgroup import Counters
from crater_agent.docker_calls import Calls
from crater_agent.docker_engine import Container, Engine
from crater_agent.docker_errors import EngineAway
from crater_agent.docker_output import Follower
from crater_agent.forked import start_ticks, write_record
from crater_agent.records import Record, Records
from crater_agent.spawner import Spawner

log = logging.getLogger("crater.agent.docker")
OUTPUT_PATIENCE_S = 10.0
BY_THE_ENGINE = (128 + signal.SIGKILL, 128 + signal.SIGTERM, 255)
"""Exit codes of containers that an engine takes down with itself."""


@dataclass(slots=True)
class Run:
    """One container that this agent has, from before it is made until it is removed."""

    record: Record
    name: str
    given_up: asyncio.Event = field(default_factory=asyncio.Event)
    """It is to end before it has begun."""
    made: bool = False
    """The engine has it."""
    began: bool = False
    ended: bool = False
    ending: bool = False
    asked: bool = False
    """We have signalled it."""
    signals: set[signal.Signals] = field(default_factory=set[signal.Signals])
    """On their way to it."""
    pid: int = 0
    start_ticks: int = 0
    upper_dir: str = ""
    cores: tuple[int, ...] | None = None
    """The engine keeps it on these; None: not known, or on no particular ones."""
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is brought to other cores."""
    group: cgroup.Group | None = None
    counters: Counters | None = None
    followers: list[Follower] = field(default_factory=lambda: [])

    def lives(self) -> bool:
        return bool(self.pid) and proctree.is_alive(self.pid, self.start_ticks)


class Life:
    """`on_exit(allocation, raw)` is called when one has ended and its output is whole."""

    def __init__(
        self, engine: Engine, call: Calls, records: Records, spawner: Spawner, on_exit: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._engine, self._call, self._records, self._spawner = engine, call, records, spawner
        self._on_exit = on_exit

    def take(self, run: Run, found: Container | None) -> None:
        """What is known of a container once it runs."""
        run.made = run.began = True
        if found is not None and found.running:
            run.pid, run.start_ticks = found.pid, start_ticks(found.pid) or 0
            run.upper_dir, run.group = found.upper_dir, cgroup.group_of(found.pid, found.id)
        if found is not None and not run.followers:
            run.followers = [self._follower(run, stream) for stream in ("stdout", "stderr")]
            for follower in run.followers:
                follower.start()

    def _follower(self, run: Run, stream: str) -> Follower:
        return Follower(
            run.name,
            lambda since_s: self._engine.output(run.name, stream, since_s),
            self._records.log_file(run.record.allocation, stream),
            self._records.directory(run.record.allocation) / f"{stream}.position",
            lambda: not run.ending,
        )

    def guard(self, run: Run, fence_grace_ms: int) -> None:
        """Have the spawner end it in time where no agent does."""
        if run.record.restartable:
            guard = {
                "dir": str(self._records.directory(run.record.allocation)),
                "socket": self._engine.socket,
                "container": run.name,
                "pid": run.pid,
                "start_ticks": run.start_ticks,
                "fence_grace_ms": fence_grace_ms,
            }
            self._spawner.guard(run.record.allocation, guard)

    def signal(self, run: Run, number: signal.Signals) -> None:
        if not run.ended:
            run.asked = True
            run.given_up.set()
            if run.began and number not in run.signals:
                run.signals.add(number)
                self._call.job(self._signal(run, number))

    async def _signal(self, run: Run, number: signal.Signals) -> None:
        try:
            await self._call(self._engine.signal, run.name, number)
        except EngineAway:
            if run.lives():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(run.pid, number)
        finally:
            run.signals.discard(number)

    async def look(self, run: Run | None, found: Container | None = None, *, missed: bool = False) -> None:
        """See whether it has ended; `missed`: nobody has listened for a while."""
        if run is None or not run.began or run.ending:
            return
        found = found or await self._call(self._engine.inspect, run.name)
        if found is not None and found.running:
            self.take(run, found)
            return
        if run.ending:
            return
        run.ending = True
        self.take(run, found)
        await self._end(run, await self._raw(run, found, missed))

    def look_without_engine(self, run: Run) -> None:
        if run.began and not run.ending and not run.lives():
            run.ending = True
            self._call.job(self._end(run, {"known": False, "engine_lost": True}, OUTPUT_PATIENCE_S / 10))

    async def _raw(self, run: Run, found: Container | None, missed: bool) -> dict[str, Any]:
        """How it ended, as `exit.json` keeps it."""
        fenced = (self._records.directory(run.record.allocation) / "fenced.json").exists()
        if found is None:
            return {"known": False, "fenced": fenced}
        code = found.exit_code if found.exit_code is not None else -1
        by_engine = code in BY_THE_ENGINE and not (run.asked or found.oom_killed or fenced)
        lost = by_engine and (missed or not await self._call(self._engine.reachable))
        signalled = 128 < code <= 128 + signal.SIGRTMAX
        return {
            "code": None if signalled else code,
            "signal": code - 128 if signalled else None,
            "fenced": fenced,
            "oom_kills": int(found.oom_killed),
            "engine_lost": lost,
        }

    async def _end(self, run: Run, raw: dict[str, Any], patience_s: float = OUTPUT_PATIENCE_S) -> None:
        counters = run.counters or Counters()
        peak_bytes = counters.memory_max_bytes
        if raw.get("oom_kills"):
            # The kernel kills at the limit, mostly between two looks.
            peak_bytes = max(peak_bytes, run.record.memory_bytes)
        raw |= {"cpu_ms": counters.cpu_ms, "memory_peak_bytes": peak_bytes, "at_ms": time.time_ns() // 1_000_000}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await asyncio.gather(*(follower.finished.wait() for follower in run.followers))
        for follower in run.followers:
            if not follower.finished.is_set():
                follower.given_up.set()
                log.warning("the last output of %s may be missing", run.record.allocation)
        self._spawner.unguard(run.record.allocation)
        with contextlib.suppress(OSError):
            write_record(str(self._records.directory(run.record.allocation)), "exit.json", raw)
        run.ended = True
        self._on_exit(run.record.allocation, raw)
