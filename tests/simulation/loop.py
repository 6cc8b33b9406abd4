"""An event loop whose time is simulated, and simulated processes whose callbacks run only while they live.

Every callback belongs to the process in whose context it was made. A process that is killed never runs again, not even its
`finally` clauses, as after SIGKILL; one that is paused catches up later, as after SIGCONT.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

_CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """`on_death` is called once, whatever ends it."""

    def __init__(self, loop: VirtualLoop, name: str, on_death: Callable[[], None] = lambda: None) -> None:
        self.loop, self.name = loop, name
        self.alive, self.paused = True, False
        self.steps_left: int | None = None
        """After so many callbacks it is killed: a crash between any two of its steps."""
        self.dies_at_disk: str | None = None
        """"before" or "after": it is killed at its next write to disk."""
        self.before_disk: tuple[Any, Callable[[], None]] | None = None
        """What happens once, as the next call of this executor is about to reach the disk; it may pause the process."""
        self.disk: Callable[[], float] = lambda: 0.0
        """How many seconds its next read or write takes."""
        self.sent: Callable[[], bool] = lambda: False
        """Whether its next call has left it already, so that it happens even if the process is paused or dies meanwhile."""
        self.tasks: list[asyncio.Task[Any]] = []
        self._held: list[asyncio.Handle] = []
        self._on_death = on_death
        self._context = contextvars.copy_context()
        self._context.run(_CURRENT.set, self)

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work, context=self._context.copy())
        task.add_done_callback(self._ended, context=contextvars.Context())
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.loop.faults.append(f"{self.name}: {''.join(traceback.format_exception(error)[-6:])}")

    def soon(self, call: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon(call, *args, context=self._context)

    def later(self, wait_s: float, call: Callable[..., Any], *args: Any) -> None:
        self.loop.call_later(wait_s, call, *args, context=self._context)

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.loop.dropped += self._held
            self._on_death()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        held, self._held = self._held, []
        self.loop.take_back(held)

    def takes(self, handle: asyncio.Handle) -> bool:
        """Whether this callback runs now."""
        if not self.alive:
            self.loop.dropped.append(handle)
            return False
        if self.paused:
            self._held.append(handle)
            return False
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left <= 0:
                self.kill()
                self.loop.dropped.append(handle)
                return False
        return True


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is ready in order; when nothing is, the time jumps to the next timer. Executor calls run in line."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self._now_s = 0.0
        self._over = False
        self.left: list[asyncio.Task[Any]] = []
        self.dropped: list[asyncio.Handle] = []
        self.faults: list[str] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._on_fault)

    def time(self) -> float:
        return self._now_s

    def now_ms(self) -> int:
        return round(self._now_s * 1000)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """The call happens at one moment, some time from now, and its end is heard some time later. A call that gives a
        future is over when that is."""
        process, answer = _CURRENT.get(), self.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                answer.set_result(result) if error is None else answer.set_exception(error)

        def do() -> None:
            if process is not None and process.before_disk is not None and process.before_disk[0] is executor:
                (_, happens), process.before_disk = process.before_disk, None
                happens()
                process.soon(do)
                return
            if process is not None and process.dies_at_disk == "before":
                process.kill()
                return
            try:
                result, error = func(*args), None
            except Exception as failure:
                result, error = None, failure
            if process is not None and process.dies_at_disk == "after":
                process.kill()
                return
            if isinstance(result, asyncio.Future):
                result.add_done_callback(lambda _: settle(None, None))
            else:
                self.call_later(wait_s / 2 + getattr(error, "takes_s", 0.0), settle, result, error)

        wait_s = process.disk() if process is not None else 0.0
        sent = process is not None and process.sent()
        self.call_later(wait_s / 2, do, context=contextvars.Context() if sent else None)
        return answer

    def take_back(self, handles: list[asyncio.Handle]) -> None:
        self._ready.extend(handles)

    def close(self) -> None:
        """Nothing counts any more: whatever was left in the middle, in dead processes too, is cancelled and taken apart."""
        self._over = True
        self.take_back(self.dropped)
        self.set_exception_handler(lambda *_: None)
        left = [task for task in self.left if not task.done()]
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.wait(left, timeout=60))
        self.left.clear()
        self._scheduled.clear()
        super().close()

    # What asyncio's own loop calls.

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            assert scheduled, "nothing will ever happen again"
            self._now_s = max(self._now_s, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now_s:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        handle = ready.popleft()
        if handle._cancelled:
            return
        process = handle._context.get(_CURRENT)
        if process is None or self._over or process.takes(handle):
            self.steps += 1
            handle._run()

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **more)
        self.left.append(task)
        if len(self.left) > 2_000:
            self.left = [one for one in self.left if not one.done()]
        return task

    def _on_fault(self, _: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        error = told.get("exception")
        self.faults.append(f"{told.get('message')}: {error!r}")

    def _write_to_self(self) -> None:
        pass

    def _process_events(self, event_list: Any) -> None:
        pass


class Clock:
    """A machine's clocks: the monotonic one begins at its boot and drifts a little, the wall clock may jump."""

    def __init__(self, loop: VirtualLoop, drift: float = 0.0) -> None:
        self._loop, self._drift = loop, drift
        self._boot_ms = 0
        self.jumped_ms = 0

    def boot(self) -> None:
        self._boot_ms = self._loop.now_ms()

    def now_ms(self) -> int:
        return 1_700_000_000_000 + self._loop.now_ms() + self.jumped_ms

    def monotonic_ms(self) -> int:
        return 5_000 + round((self._loop.now_ms() - self._boot_ms) * (1 + self._drift))
