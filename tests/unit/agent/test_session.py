"""The conversation with the scheduler, where it decides what an answer is still worth."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from crater_agent.session import Session
from crater_core.clock import ManualClock
from crater_core.wire.agents import HeartbeatAnswer, Leases, NodeDeclaration, Registered


class Line:
    """A scheduler that answers when the test says so."""

    node, endpoint = "n1", "http://s1"

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[str, Any, asyncio.Future[Any]]] = asyncio.Queue()

    def __getattr__(self, what: str) -> Any:
        async def ask(*args: Any) -> Any:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self.asked.put_nowait((what, args, answer))
            return await answer

        return ask

    async def next(self, what: str) -> tuple[Any, asyncio.Future[Any]]:
        while True:
            async with asyncio.timeout(5):
                asked, args, answer = await self.asked.get()
            if asked == what:
                return args, answer
            assert asked == "heartbeat", asked
            answer.set_result(HeartbeatAnswer(term=1, server_time_ms=0))


def test_what_was_said_before_the_lease_ran_out_is_void_and_asked_for_anew() -> None:
    async def story() -> None:
        clock, line = ManualClock(), Line()
        records = SimpleNamespace(save_lease_clock=lambda *_: None)
        place = SimpleNamespace(boot_id="b", scratch_root=Path("/"))
        runtime: Any = SimpleNamespace(spawner=SimpleNamespace(renew=lambda _: None), records=records, place=place)
        link: Any = line
        session = Session(NodeDeclaration(), link, runtime, {}, clock)
        talking = asyncio.create_task(session.run())
        try:
            _, registered = await line.next("register")
            answer = Registered(term=1, heartbeat_interval_ms=10, heartbeat_timeout_ms=30_000, server_time_ms=0)
            registered.set_result(answer)
            _, poll = await line.next("leases")
            poll.set_result(Leases(revision=5, term=1, leases=[]))
            (after, _), late = await line.next("leases")
            assert (after, session.heard.leases) == (5, {})
            clock.advance(28_000)
            _, beat = await line.next("heartbeat")
            beat.set_result(HeartbeatAnswer(term=1, server_time_ms=0))
            while session.heard.lapses == 0:
                _, beat = await line.next("heartbeat")
                beat.set_result(HeartbeatAnswer(term=1, server_time_ms=0))
                await asyncio.sleep(0)
            assert session.heard.leases is None
            late.set_result(Leases(revision=6, term=1, leases=[]))
            (after, _), _ = await line.next("leases")
            assert (after, session.heard.leases) == (None, None)
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)

    asyncio.run(story())


def test_what_changes_while_a_registration_is_on_its_way_is_registered_after_it() -> None:
    async def story() -> None:
        line = Line()
        records = SimpleNamespace(save_lease_clock=lambda *_: None)
        place = SimpleNamespace(boot_id="b", scratch_root=Path("/"))
        runtime: Any = SimpleNamespace(spawner=SimpleNamespace(renew=lambda _: None), records=records, place=place)
        link: Any = line
        session = Session(NodeDeclaration(), link, runtime, {}, ManualClock())
        talking = asyncio.create_task(session.run())
        try:
            (first,), registered = await line.next("register")
            session.declare(first.model_copy(update={"notes": ("changed",)}))
            answer = Registered(term=1, heartbeat_interval_ms=10, heartbeat_timeout_ms=30_000, server_time_ms=0)
            registered.set_result(answer)
            (second,), _ = await line.next("register")
            assert (first.notes, second.notes) == ((), ("changed",))
        finally:
            talking.cancel()
            await asyncio.gather(talking, return_exceptions=True)

    asyncio.run(story())
