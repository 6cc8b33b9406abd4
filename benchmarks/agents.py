"""Simulated agents on real connections: each registers, polls its leases, beats, and lets its tasks run for a while.

They speak HTTP over plain sockets, so that a thousand of them weigh little beside the scheduler that is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from random import Random
from typing import Any

CORES = 8
BEAT_S = 10.0
POLL_S = 25
GIB = 1024**3


class Line:
    """One connection that is kept; one call at a time."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self._turn:
            return await self._call(method, path, body)

    async def _call(self, method: str, path: str, body: Any = None) -> Any:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        writer.write(f"{head}\r\n\r\n".encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        found = json.loads(await reader.readexactly(int(answer.partition("content-length: ")[2].partition("\r\n")[0])))
        status = int(answer.split()[1])
        assert status < 300, (method, path, status, found)
        return found

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class Agents:
    """So many of them, until `stop`. `beats_ms` are the times of heartbeats since the last `begin`."""

    def __init__(self, host: str, port: int, count: int, run_s: float = 0.0) -> None:
        self._host, self._port, self._count, self._run_s = host, port, count, run_s
        self._rng = Random(1)
        self._lives: list[asyncio.Task[None]] = []
        self._lines: list[Line] = []
        self.beats_ms: list[float] = []
        self.ended = 0

    async def start(self) -> None:
        """Comes back when all of them have registered."""
        names = [f"sim-{number:04}" for number in range(self._count)]
        gate = asyncio.Semaphore(32)

        async def register(name: str) -> Line:
            line = self._line()
            async with gate:
                await line.call("POST", f"/v1/agents/{name}/register", _declaration(name))
            return line

        lines = await asyncio.gather(*map(register, names))
        for name, line in zip(names, lines, strict=True):
            self._lives += [asyncio.create_task(self._beat(name, line)), asyncio.create_task(self._work(name))]

    def begin(self) -> None:
        self.beats_ms, self.ended = [], 0

    def check(self) -> None:
        """Raises what has ended one of them."""
        for life in self._lives:
            if life.done():
                life.result()

    async def stop(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        for line in self._lines:
            line.close()

    def _line(self) -> Line:
        self._lines.append(Line(self._host, self._port))
        return self._lines[-1]

    async def _beat(self, name: str, line: Line) -> None:
        await asyncio.sleep(self._rng.random() * BEAT_S)
        while True:
            began = time.perf_counter()
            await line.call("POST", f"/v1/agents/{name}/heartbeat", {"load_1m": 1.0, "free_disk_bytes": GIB})
            self.beats_ms.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(BEAT_S)

    async def _work(self, name: str) -> None:
        polls, reports = self._line(), self._line()
        known: set[str] = set()
        path = f"/v1/agents/{name}/leases"
        leases = await polls.call("GET", path)
        while True:
            new = [lease for lease in leases["leases"] if lease["allocation"] not in known]
            known = {lease["allocation"] for lease in leases["leases"]}
            if new:
                await self._report(name, reports, new, "running")
                asyncio.get_running_loop().call_later(self._run_s * (0.5 + self._rng.random()), self._end, name, reports, new)
            leases = await polls.call("GET", f"{path}?after={leases['revision']}&wait={POLL_S}")

    def _end(self, name: str, reports: Line, leases: list[Any]) -> None:
        self._lives.append(asyncio.create_task(self._report(name, reports, leases, "succeeded")))

    async def _report(self, name: str, line: Line, leases: list[Any], status: str) -> None:
        told = [{"allocation": one["allocation"], "token": one["token"], "status": status, "exit_code": 0} for one in leases]
        await line.call("POST", f"/v1/agents/{name}/reports", {"reports": told})
        self.ended += (status == "succeeded") * len(leases)


def _declaration(name: str) -> dict[str, Any]:
    amounts = {"cpu_milli": CORES * 1000, "memory_bytes": 64 * GIB, "disk_bytes": 100 * GIB}
    pools = {"cpu-pool": "cpu", "memory-pool": "memory", "disk-pool": "disk"}
    return {"pools": pools, "capacity": amounts, "allocatable": amounts, "boot_id": name, "agent_secret": "none"}
