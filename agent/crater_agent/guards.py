"""The spawner's side of containers: it ends those that may be started elsewhere when no agent renews their lease.

Standard library only. The engine is asked over its Unix socket; where it does not answer, the container's first process is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from typing import Any

from crater_agent import forked

ANSWER_TIMEOUT_S = 2.0
AGAIN_S = 1.0
"""How long after a kill that was not confirmed the next one comes."""
Message = dict[str, Any]


class Guard:
    def __init__(self, message: Message) -> None:
        self.directory: str = message["dir"]
        self.socket: str = message["socket"]
        self.container: str = message["container"]
        self.pid: int = message.get("pid", 0)
        self.start_ticks: int = message.get("start_ticks", 0)
        self.grace_s: float = message.get("fence_grace_ms", 0) / 1000
        self.asked = False
        self.next_try_at = 0.0

    def signal(self, number: signal.Signals) -> bool:
        """True when the engine has done it, or says that nothing of it runs."""
        try:
            return engine_kill(self.socket, self.container, number) in (204, 404, 409)
        except (OSError, ValueError):
            if self.pid and forked.start_ticks(self.pid) == self.start_ticks:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, number)
            return False


class Guards:
    def __init__(self) -> None:
        self._by_name: dict[str, Guard] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def add(self, message: Message) -> None:
        self._by_name[message["id"]] = Guard(message)

    def drop(self, name: str) -> None:
        self._by_name.pop(name, None)

    def graces(self) -> list[float]:
        return [guard.grace_s for guard in self._by_name.values()]

    def fence(self, fence_at: float, now: float) -> None:
        """Asks in time and kills on time, as with children; a container is let go once it is surely dead."""
        for name, guard in list(self._by_name.items()):
            if now < fence_at - guard.grace_s:
                continue
            if not guard.asked:
                guard.asked = True
                # An agent that comes back learns from it why the container has ended.
                with contextlib.suppress(OSError):
                    forked.write_record(guard.directory, "fenced.json", {"at_ms": time.time_ns() // 1_000_000})
                guard.signal(signal.SIGTERM)
            if now >= fence_at and now >= guard.next_try_at:
                guard.next_try_at = now + AGAIN_S
                if guard.signal(signal.SIGKILL):
                    self.drop(name)


def engine_kill(path: str, container: str, number: signal.Signals) -> int:
    """The status that the engine answers with. Raises OSError and ValueError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(path)
        request = f"POST /containers/{container}/kill?signal={number.name} HTTP/1.0\r\nHost: docker\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(request.encode())
        return int(connection.recv(64).split(b" ", 2)[1])
