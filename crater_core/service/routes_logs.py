"""Output of tasks: read from the agent that has it, and passed on as it comes."""

from __future__ import annotations

from typing import Annotated, Literal

import httpx
from fastapi import APIRouter, Query
from starlette.responses import Response

from crater_core.errors import NotFound, Unavailable
from crater_core.model.allocation import Allocation
from crater_core.service.http import Hub
from crater_core.service.openapi import described
from crater_core.service.routes_tasks import Text, Wait
from crater_core.service.views import find_task
from crater_core.store.protocol import StoredTask

BYTES_MAX = 8 * 1024**2
_PASSED_ON = ("crater-next-offset", "crater-complete")


class LogRoutes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tasks"])
        router.add_api_route(
            "/v1/tasks/{task_id}/logs",
            self.logs,
            methods=["GET"],
            **described("Output of a task", "application/octet-stream"),
        )
        return router

    async def logs(
        self,
        task_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: Annotated[int, Query(ge=0, le=2**62)] = 0,
        limit: Annotated[int, Query(ge=1, le=BYTES_MAX)] = 1024**2,
        wait: Wait = 0.0,
        allocation: Text = None,
    ) -> Response:
        stored = await find_task(self._engine, task_id)
        source = await self._source(stored, allocation)
        if source is None and wait and not stored.task.status.ended:
            await self._engine.bell.wait(("task", task_id), wait)
            stored = await find_task(self._engine, task_id)
            source = await self._source(stored, allocation)
        if source is None:  # Nothing has run yet: no output so far, and none ever if it has ended.
            complete = "true" if stored.task.status.ended else "false"
            headers = {"Crater-Next-Offset": str(offset), "Crater-Complete": complete}
            return Response(b"", headers=headers, media_type="application/octet-stream")
        return await self._ask(source, {"stream": stream, "offset": offset, "limit": limit, "wait": wait})

    async def _source(self, stored: StoredTask, allocation: str | None) -> Allocation | None:
        if allocation is None:
            return min(stored.allocations, key=lambda a: a.member, default=None)
        for mine in stored.allocations:
            if mine.id == allocation:
                return mine
        found: Allocation | None = await self._engine.read(self._engine.store.allocation, allocation)
        if found is None or found.task != stored.task.id:
            raise NotFound(f"the task has no allocation {allocation[:100]}", task=stored.task.id, allocation=allocation[:100])
        return found

    async def _ask(self, source: Allocation, params: dict[str, str | int | float]) -> Response:
        self._engine.must_lead()  # Agents give their secrets to the leader alone.
        node = self._engine.shown.snapshot.nodes.get(source.node)
        secret = self._engine.heard.secrets.get(source.node)
        if node is None or secret is None or not node.agent_url:
            raise Unavailable(f"the output lies on node {source.node}, which is not connected now", node=source.node)
        url = f"{node.agent_url.rstrip('/')}/logs/{source.id}"
        timeout = httpx.Timeout(5.0, read=float(params["wait"]) + 10.0)
        try:
            got = await self._hub.agents.get(url, params=params, headers={"Authorization": f"Bearer {secret}"}, timeout=timeout)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise Unavailable(
                f"the output lies on node {source.node}, whose agent cannot be reached: {why}", node=source.node, reason=why
            ) from error
        if got.status_code == 404:
            raise NotFound(f"node {source.node} has no output of allocation {source.id} any more", node=source.node)
        if got.status_code != 200:
            raise Unavailable(f"the agent on node {source.node} answered {got.status_code}", node=source.node)
        headers = {name: got.headers[name] for name in _PASSED_ON if name in got.headers}
        return Response(got.content, headers=headers, media_type="application/octet-stream")
