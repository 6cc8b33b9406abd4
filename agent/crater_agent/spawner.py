"""The agent's side of the spawner: finds a living one or starts one, and speaks with it over its Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from crater_agent import shim
from crater_core.errors import RuntimeFailed

Message = dict[str, Any]
START_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0


class Spawner:
    """One connection to the spawner of `data_dir`. `on_exit(name, exit)` is called for every child that ends."""

    def __init__(self, data_dir: Path, on_exit: Callable[[str, Message], None], on_lost: Callable[[], None]) -> None:
        self._data_dir = data_dir
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._count = 0
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self.pid = 0
        self.protocol = 0
        """Of the living spawner, which may be older than this agent."""
        self._guards: dict[str, Message] = {}
        self.children: dict[str, int] = {}
        """What was running when we connected, by name."""

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def connect(self) -> bool:
        """True when a spawner was there already, False when a new one was started."""
        found = await self._open()
        if not found:
            await self._start()
            if not await self._open():
                raise RuntimeFailed("the spawner does not answer on its socket", data_dir=str(self._data_dir))
        answer = await self.ask({"op": "hello"})
        self.pid, self.protocol = int(answer["pid"]), int(answer["protocol"])
        self.children = {child["id"]: child["pid"] for child in answer["children"]}
        for guard in self._guards.values():
            self._tell(guard)
        return found

    async def ask(self, message: Message) -> Message:
        """Waits a while for a spawner that is just being replaced. Raises RuntimeFailed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._connected.wait()
        if self._writer is None:
            raise RuntimeFailed("the spawner is not connected", again=1)
        self._count += 1
        number = self._count
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._writer.write(json.dumps({**message, "n": number}).encode() + b"\n")
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise RuntimeFailed("the spawner did not answer", again=1) from None
        finally:
            self._answers.pop(number, None)

    def renew(self, for_ms: int) -> None:
        """Tell it how much longer what may be started elsewhere may live without hearing this again."""
        self._tell({"op": "renew", "for_ms": for_ms})

    def guard(self, name: str, guard: Message) -> None:
        """Have it end a container, too, when no agent renews the lease; told again to a spawner that takes its place."""
        self._guards[name] = {"op": "guard", "id": name, **guard}
        self._tell(self._guards[name])

    def unguard(self, name: str) -> None:
        if self._guards.pop(name, None) is not None:
            self._tell({"op": "unguard", "id": name})

    def _tell(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    def park(self, group: str, procs_files: tuple[str, ...]) -> None:
        """Have a child join a cgroup now and wait there for the order that names the group."""
        self._tell({"op": "park", "group": group, "procs_files": list(procs_files)})

    async def quit(self) -> None:
        with contextlib.suppress(RuntimeFailed):
            await self.ask({"op": "quit"})
        await self.close()

    async def close(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _open(self) -> bool:
        # A Unix socket's path is at most 107 bytes long; through the descriptor of its directory it is always short.
        directory = os.open(self._data_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            reader, self._writer = await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{shim.SOCKET}", limit=1 << 24)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        finally:
            os.close(directory)
        self._listening = asyncio.create_task(self._listen(reader))
        self._connected.set()
        return True

    async def _start(self) -> None:
        log = os.open(self._data_dir / "spawner.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 (once, at start)
                [sys.executable, "-I", "-S", shim.__file__, str(self._data_dir)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            )
        finally:
            os.close(log)
        assert process.stdout is not None
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(START_TIMEOUT_S):
                ready = await loop.run_in_executor(None, process.stdout.readline)
        except TimeoutError:
            ready = b""
        process.stdout.close()
        if ready != b"ready\n" and process.poll() not in (None, 0):
            raise RuntimeFailed("the spawner did not start; see spawner.log", data_dir=str(self._data_dir))
        # It outlives this process on purpose; one that ended before is reaped here.
        _own_children[:] = [child for child in _own_children if child.poll() is None] + [process]

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = cast(Message, json.loads(line))
                if message.get("op") == "exit":
                    self._on_exit(message["id"], message["exit"])
                elif (answer := self._answers.get(message.get("re", 0))) is not None and not answer.done():
                    answer.set_result(message)
        except ConnectionError:
            pass
        self._writer = None
        self._connected.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RuntimeFailed("the spawner is gone", again=1))
        if self._listening is not None:
            self._on_lost()


_own_children: list[subprocess.Popen[bytes]] = []
"""Kept so that a spawner that is still alive is not warned about when this process ends."""
