"""The five busiest calls, answered without the framework's routing, which costs more than they do.

Only their plain form is taken here; everything else goes to the framework, whose routes are the same functions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from crater_core.errors import CraterError
from crater_core.service.gate import too_large
from crater_core.service.http import plain_problem, problem
from crater_core.service.routes_agents import AgentRoutes
from crater_core.service.routes_tasks import TaskRoutes

log = logging.getLogger("crater.http")
_AFTER = re.compile(rb"[0-9]{1,18}")
_WAIT = re.compile(rb"(?:[0-9]|[1-5][0-9])(?:\.[0-9]{1,20})?")
Answer = Callable[[Request], Awaitable[Response]]


class HotPaths:
    """ASGI application around the framework's."""

    def __init__(self, app: ASGIApp, tasks: TaskRoutes, agents: AgentRoutes) -> None:
        self._app, self._tasks, self._agents = app, tasks, agents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["crater.route"], call = found
        try:
            response = await call(Request(scope, receive))
        except CraterError as error:
            response = problem(error)
        except HTTPException:
            response = too_large()
        except Exception as error:
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            response = plain_problem(500, "internal_error", "a fault in the scheduler; its log has the details")
        await response(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[str, Answer] | None:
        method, query = scope["method"], scope["query_string"]
        parts = scope["path"].split("/")
        if parts[1:2] != ["v1"]:
            return None
        if method == "POST" and not query:
            return self._posted(parts)
        timing = _timing(query) if method == "GET" else None
        if timing is None:
            return None
        after, wait = timing
        if len(parts) == 5 and parts[2] == "agents" and parts[4] == "leases":
            return "/v1/agents/{node}/leases", lambda _: self._agents.leases(parts[3], after, wait)
        if len(parts) == 4 and parts[2] == "tasks" and parts[3]:
            return "/v1/tasks/{task_id}", lambda _: self._tasks.show(parts[3], wait, after)
        return None

    def _posted(self, parts: list[str]) -> tuple[str, Answer] | None:
        if len(parts) == 3 and parts[2] == "tasks":
            return "/v1/tasks", self._tasks.submit
        if len(parts) == 5 and parts[2] == "agents":
            if parts[4] == "reports":
                return "/v1/agents/{node}/reports", lambda request: self._agents.reports(request, parts[3])
            if parts[4] == "heartbeat":
                return "/v1/agents/{node}/heartbeat", lambda request: self._agents.heartbeat(request, parts[3])
        return None


def _timing(query: bytes) -> tuple[int | None, float] | None:
    """`after` and `wait` when the query has nothing else, each in its plain form."""
    after, wait = None, 0.0
    for part in query.split(b"&") if query else ():
        name, _, value = part.partition(b"=")
        if name == b"after" and _AFTER.fullmatch(value):
            after = int(value)
        elif name == b"wait" and _WAIT.fullmatch(value):
            wait = float(value)
        else:
            return None
    return after, wait
