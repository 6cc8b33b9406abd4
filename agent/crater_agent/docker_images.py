"""Images on this node: looked for, fetched with the registry's credentials, and how far that is told while it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from crater_agent.config import Docker, profile_value
from crater_agent.docker_engine import Engine
from crater_agent.docker_spec import Image, registry_of
from crater_agent.workload import Workload
from crater_core.errors import RuntimeFailed
from crater_core.model.reason import Reason, ReasonCode

T = TypeVar("T")
PROGRESS_S = 2.0


class Call(Protocol):
    """Runs a blocking call of the engine elsewhere."""

    def __call__(self, function: Callable[..., T], *arguments: Any) -> Awaitable[T]: ...


class Images:
    def __init__(
        self, engine: Engine, settings: Docker, node: str, call: Call, on_progress: Callable[[Workload, Reason], None]
    ) -> None:
        self._engine, self._settings, self._node = engine, settings, node
        self._call, self._on_progress = call, on_progress

    async def get(self, name: str, workload: Workload, given_up: asyncio.Event) -> Image:
        """The image on this node, fetched where it is missing. Raises RuntimeFailed, also when `given_up` is set meanwhile."""
        policy = self._settings.pull
        image = await self._call(self._engine.image, name) if policy != "always" else None
        if image is None and policy == "never":
            raise RuntimeFailed(f"image {name} is not on this node, and docker.pull is never", again=1)
        if image is None:
            await self._pull(name, workload, given_up)
            image = await self._call(self._engine.image, name)
        if image is None:
            raise RuntimeFailed(f"image {name} was fetched and is not there", again=1)
        return image

    async def _pull(self, name: str, workload: Workload, stop: asyncio.Event) -> None:
        """Fetch an image, saying how far it is, for as long as it takes, is wanted, and is allowed to take."""
        auth, far, over = self._credentials(registry_of(name)), [0, 0], threading.Event()

        def progress(done_bytes: int, total_bytes: int) -> None:
            far[:] = (done_bytes, total_bytes)

        began, told = time.monotonic(), None
        workload.preparing = True
        pulling = in_thread(lambda: self._engine.pull(name, auth, progress, lambda: not over.is_set()))
        given_up = asyncio.create_task(stop.wait())
        waited: set[asyncio.Future[Any]] = {pulling, given_up}
        try:
            while not pulling.done():
                if told != tuple(far):
                    told = tuple(far)
                    facts = {"node": self._node, "image": name, "done_bytes": told[0], "total_bytes": told[1]}
                    self._on_progress(workload, Reason.of(ReasonCode.IMAGE_PULLING, **facts))
                left_s = self._settings.pull_timeout / 1000 - (time.monotonic() - began)
                if left_s <= 0:
                    raise RuntimeFailed(
                        f"image {name} was not there after {self._settings.pull_timeout / 1000:g} s (docker.pull_timeout): "
                        f"{far[0]} of {far[1]} bytes fetched",
                        again=1,
                    )
                await asyncio.wait(waited, timeout=min(PROGRESS_S, left_s), return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    raise RuntimeFailed("it was told to end while its image was being fetched")
            pulling.result()
        finally:
            over.set()
            given_up.cancel()
            # Nobody asks any more; an error that comes later is not left unheard.
            pulling.add_done_callback(lambda future: future.cancelled() or future.exception())
            workload.preparing = False

    def _credentials(self, registry: str) -> dict[str, str]:
        credentials = self._settings.registries.get(registry)
        if credentials is None:
            return {}
        try:
            password = profile_value(credentials.password, os.environ)
        except LookupError as error:
            raise RuntimeFailed(f"the password for registry {registry}: {error.args[0]}", again=1) from None
        return {"username": credentials.username, "password": password, "serveraddress": registry}


def in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """In a thread of its own, which may be left behind: an engine can be silent for long."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not result.done():
            result.set_result(None) if error is None else result.set_exception(error)

    def run() -> None:
        failed: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failed = error
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, failed)

    threading.Thread(target=run, name="docker pull", daemon=True).start()
    return result
