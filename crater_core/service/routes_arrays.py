"""Task arrays over HTTP: submit, show, wait, cancel. Their tasks are ordinary ones: `GET /v1/tasks?array=ID` lists them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from crater_core.service.arrays import cancel_array, show_array, submit_array
from crater_core.service.http import Hub, answer, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.service.routes_tasks import checked_key
from crater_core.wire.arrays import ArraySubmission, ArrayView
from crater_core.wire.tasks import CancelBody


class ArrayRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tasks"])
        key = {"Idempotency-Key": "a name of your own for this submit: a repeat gives the same array"}
        router.add_api_route(
            "/v1/arrays",
            self.submit,
            methods=["POST"],
            **described("Submit a task array", ArrayView, 201, ArraySubmission, key, also=(200,)),
        )
        router.add_api_route(
            "/v1/arrays/{array_id}",
            self.show,
            methods=["GET"],
            **described("Show an array, or wait for it to change", ArrayView),
        )
        router.add_api_route(
            "/v1/arrays/{array_id}/cancel",
            self.cancel,
            methods=["POST"],
            **described("End every live task of an array", ArrayView, takes=CancelBody),
        )
        return router

    async def submit(self, request: Request) -> Response:
        who = identity_of(request)
        body = await body_of(request, ArraySubmission)
        who.must_reach(body.task.project)
        key = checked_key(request.headers.get("idempotency-key"), "Idempotency-Key")
        array, new = await submit_array(self._engine, body.task.to_spec(who.user), body.indices, body.running_max, key)
        return answer(await show_array(self._engine, array), 201 if new else 200)

    async def show(
        self,
        array_id: str,
        wait: Annotated[float, Query(ge=0, le=60, description="seconds to wait for news")] = 0.0,
        after: Annotated[int | None, Query(ge=0, le=2**62)] = None,
    ) -> Response:
        engine = self._engine
        view = await show_array(engine, array_id)
        after = view.revision if after is None else after
        until_ms = engine.clock.monotonic_ms() + round(wait * 1000)
        while view.revision == after and not view.ended:
            if not await engine.bell.wait(("array", array_id), (until_ms - engine.clock.monotonic_ms()) / 1000):
                break
            view = await show_array(engine, array_id)
        return answer(view)

    async def cancel(self, request: Request, array_id: str) -> Response:
        who = identity_of(request)
        body = await body_of(request, CancelBody, b"{}")
        return answer(await cancel_array(self._engine, array_id, who, body.reason))
