"""Watching over HTTP: what changed since a revision, and everything that happens as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from crater_core.model.history import Event
from crater_core.service.engine import Engine
from crater_core.service.http import Hub, answer_bytes
from crater_core.service.openapi import described
from crater_core.service.routes_tasks import Text, Wait
from crater_core.service.views import task_list
from crater_core.store.protocol import StoredEvent, StoredTask
from crater_core.wire.tasks import EventView, TaskChanges

CHANGES_MAX = 1000
KEEP_ALIVE_S = 15.0
After = Annotated[int | None, Query(ge=0, le=2**62)]


class WatchRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["watching"])
        router.add_api_route(
            "/v1/changes", self.changes, methods=["GET"], **described("Tasks changed since a revision", TaskChanges)
        )
        router.add_api_route(
            "/v1/events", self.events, methods=["GET"], **described("Everything that happens", "text/event-stream")
        )
        return router

    async def changes(self, after: After = None, group: Text = None, wait: Wait = 0.0) -> Response:
        engine = self._engine
        after = engine.shown.revision if after is None else after
        until_ms = engine.clock.monotonic_ms() + round(wait * 1000)
        key = ("group", group) if group is not None else "tasks"
        while True:
            seen = engine.shown.revision
            found, whole = await self._changed(after, group, seen)
            left_s = (until_ms - engine.clock.monotonic_ms()) / 1000
            if found or left_s <= 0 or after > seen or engine.bell.closed:
                break
            # A change may have come while the store was read.
            if engine.shown.revision == seen:
                await engine.bell.wait(key, left_s)
        views = await task_list(engine, found)
        return answer_bytes(f'{{"revision":{whole},"tasks":['.encode() + views + b"]}")

    async def _changed(self, after: int, group: str | None, seen: int) -> tuple[list[StoredTask], int]:
        if after >= seen:  # Above: from another life of the store; the caller starts again from here.
            return [], seen
        store = self._engine.store
        return await self._engine.read(store.tasks_changed, after, group, CHANGES_MAX)

    async def events(
        self,
        request: Request,
        after: After = None,
        group: Text = None,
        subject: Annotated[str | None, Query(pattern="^(task|node|service)$")] = None,
        last_event_id: Annotated[str | None, Header(max_length=30)] = None,
    ) -> Response:
        if after is None and last_event_id is not None and last_event_id.isdecimal():
            after = min(int(last_event_id), 2**62)
        start = self._engine.shown.sequence if after is None else after
        stream = _stream(self._engine, request, start, subject, group)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _stream(engine: Engine, request: Request, after: int, subject: str | None, group: str | None) -> AsyncGenerator[str]:
    yield ": crater\n\n"
    while not engine.bell.closed:
        upto = engine.shown.sequence
        found = await _next_events(engine, after)
        for stored in found:
            if _wanted(stored.event, subject, group):
                view = EventView.of(stored.event, stored.sequence)
                yield f"id: {stored.sequence}\nevent: {view.subject}\ndata: {view.model_dump_json()}\n\n"
        after = found[-1].sequence if found else upto
        if after < engine.shown.sequence:
            continue
        rung = await engine.bell.wait("events", KEEP_ALIVE_S)
        if await request.is_disconnected():
            return
        if not rung:
            yield ": still here\n\n"


async def _next_events(engine: Engine, after: int) -> list[StoredEvent]:
    """From memory while it reaches back far enough, else from the store."""
    recent = engine.shown.events
    if after >= engine.shown.sequence:
        return []
    if recent and recent[0].sequence <= after + 1:
        first = after + 1 - recent[0].sequence
        return [recent[index] for index in range(first, min(len(recent), first + 1000))]
    return await engine.read(engine.store.events, after, 1000)


def _wanted(event: Event, subject: str | None, group: str | None) -> bool:
    return subject in (None, event.subject) and group in (None, event.group)
