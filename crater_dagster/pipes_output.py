"""Reads a task's two streams while it runs, by offset, through every attempt of it, and hands the bytes on once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from crater_core.client import CraterClient
from crater_core.errors import CraterError, NotFound
from crater_core.wire.tasks import TaskView

WAIT_S = 5.0
AGAIN_S = 0.5
TRIES_AFTER_END = 10


class TaskOutput:
    """Of one member of the task, by one thread a stream. `heard` takes every change of the task; `finish` waits until the
    last output has been handed on. `deliver` is held while bytes are handed on, and while an attempt gives way to the next."""

    def __init__(
        self,
        client: CraterClient,
        sinks: Mapping[str, Callable[[bytes], None]],
        on_new_attempt: Callable[[], None],
        member: int = 0,
        deliver: threading.RLock | None = None,
    ) -> None:
        self._client, self._sinks, self._on_new_attempt = client, dict(sinks), on_new_attempt
        self._member = member
        self._changed, self._deliver = threading.Condition(), deliver or threading.RLock()
        self._view: TaskView | None = None
        self._allocation: str | None = None
        self._closed = False
        self._problems: dict[str, str] = {}
        self._failed: BaseException | None = None
        self._threads = {
            stream: threading.Thread(target=self._read, args=(stream,), name=f"crater-{stream}", daemon=True)
            for stream in self._sinks
        }

    def start(self) -> None:
        for thread in self._threads.values():
            thread.start()

    def heard(self, view: TaskView) -> None:
        with self._deliver, self._changed:
            self._view = view
            newest = view.allocation_of(self._member)
            if newest is not None and newest != self._allocation:
                if self._allocation is not None:
                    self._on_new_attempt()
                self._allocation = newest
            self._changed.notify_all()

    def finish(self, timeout_s: float) -> list[str]:
        """Why the output may not be whole, if it is not. Raises what a sink raised."""
        for thread in self._threads.values():
            thread.join(timeout_s)
        late = [f"{stream} was not read to its end" for stream, thread in self._threads.items() if thread.is_alive()]
        self.close()
        if self._failed is not None:
            raise self._failed
        return [*late, *(f"{stream} could not be read to its end: {why}" for stream, why in self._problems.items())]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _read(self, stream: str) -> None:
        try:
            done: str | None = None
            while (allocation := self._next(done)) is not None:
                self._read_attempt(stream, allocation)
                done = allocation
        except BaseException as error:
            self._failed = error

    def _next(self, done: str | None) -> str | None:
        """The attempt after `done`, once there is one; None when there will be none."""
        with self._changed:
            while not self._closed:
                if self._allocation is not None and self._allocation != done:
                    return self._allocation
                if self._view is not None and self._view.ended:
                    return None
                self._changed.wait(1.0)
        return None

    def _read_attempt(self, stream: str, allocation: str) -> None:
        offset, left = 0, TRIES_AFTER_END
        assert self._view is not None, "an attempt is known by its task"
        while not self._closed:
            try:
                chunk = self._client.logs(
                    self._view.id,
                    stream,  # type: ignore[arg-type]
                    offset=offset,
                    wait_s=WAIT_S,
                    allocation=allocation,
                )
            except CraterError as error:
                left -= self._view.ended
                if isinstance(error, NotFound) or self._allocation != allocation or not left:
                    self._problems[stream] = error.message
                    return
                with self._changed:
                    self._changed.wait(AGAIN_S)
                continue
            self._problems.pop(stream, None)
            with self._deliver:
                if chunk.data and self._allocation == allocation:
                    self._sinks[stream](chunk.data)
            offset = chunk.next_offset
            if chunk.complete:
                return
