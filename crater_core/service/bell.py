"""Wakes those who wait for something to change, the moment it has."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Iterable


class Bell:
    """Waiters by key, first come first woken. Check, then `wait`, without `await` in between: no ring is missed in one loop."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[asyncio.Future[bool], None]] = defaultdict(dict)
        self.closed = False

    def ring(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            for waiter in self._waiting.pop(key, ()):
                _settle(waiter, True)

    def ring_all(self) -> None:
        """Everything may have changed."""
        self.ring(list(self._waiting))

    def close(self) -> None:
        """Wake everybody, and let nobody wait again: the process is stopping."""
        self.closed = True
        self.ring_all()

    async def wait(self, key: Hashable, timeout_s: float) -> bool:
        """True when the key was rung, False when the time is over."""
        if self.closed or timeout_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, waiter, False)
        self._waiting[key][waiter] = None
        try:
            return await waiter
        finally:
            timer.cancel()
            left = self._waiting.get(key)
            if left is not None:
                left.pop(waiter, None)
                if not left:
                    self._waiting.pop(key, None)


def _settle(waiter: asyncio.Future[bool], rung: bool) -> None:
    if not waiter.done():
        waiter.set_result(rung)
