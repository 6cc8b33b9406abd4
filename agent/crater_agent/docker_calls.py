"""Carries calls that block, and work that goes on beside the caller, for a loop that must not wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from crater_core.errors import RuntimeFailed

log = logging.getLogger("crater.agent.docker")
T = TypeVar("T")
CALLS_AT_ONCE = 8


class Calls:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="docker")
        self._jobs: set[asyncio.Task[None]] = set()

    async def __call__(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def job(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def close(self) -> None:
        """Waits for the jobs; a call that nobody waits for any more is dropped."""
        while self._jobs:
            await asyncio.gather(*self._jobs, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _logged(work: Coroutine[Any, Any, object]) -> None:
    """What fails because the engine is away is looked at again when it is back."""
    try:
        await work
    except RuntimeFailed as error:
        log.debug("%s", error.message)
