"""The HTTP application: every route behind the gate, every error as problem details."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from crater_core import __version__
from crater_core.errors import CraterError
from crater_core.service.auth import Guard
from crater_core.service.console_page import ConsolePage
from crater_core.service.gate import Count, Gate, too_large
from crater_core.service.hot import HotPaths
from crater_core.service.http import Hub, invalid, plain_problem, problem
from crater_core.service.openapi import schema_of
from crater_core.service.reference_page import ReferencePage
from crater_core.service.routes_agents import AgentRoutes
from crater_core.service.routes_arrays import ArrayRoutes
from crater_core.service.routes_backup import BackupRoutes
from crater_core.service.routes_cluster import ClusterRoutes
from crater_core.service.routes_logs import LogRoutes
from crater_core.service.routes_reservations import ReservationRoutes
from crater_core.service.routes_services import ServiceRoutes
from crater_core.service.routes_tasks import TaskRoutes
from crater_core.service.routes_watch import WatchRoutes
from crater_core.service.routes_whatif import WhatIfRoutes

log = logging.getLogger("crater.http")


def make_app(hub: Hub, guard: Guard, count: Count | None = None) -> ASGIApp:
    """The whole application, ready for a server."""
    app = FastAPI(title="Crater scheduler", version=__version__, docs_url=None, redoc_url=None)
    tasks, agents = TaskRoutes(hub), AgentRoutes(hub)
    others = (
        ArrayRoutes(hub),
        WhatIfRoutes(hub),
        WatchRoutes(hub),
        LogRoutes(hub),
        ClusterRoutes(hub),
        ServiceRoutes(hub),
        ReservationRoutes(hub),
        BackupRoutes(hub),
        ConsolePage(),
    )
    for routes in (agents, tasks, *others):
        app.include_router(routes.router())
    app.add_exception_handler(CraterError, _on_crater_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_fault)
    schema: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not schema:
            schema.update(schema_of(app))
        return schema

    app.openapi = openapi
    app.include_router(ReferencePage(openapi).router())
    engine = hub.engine

    def marks() -> Sequence[tuple[bytes, bytes]]:
        """What a standby answers is as old as its revision says."""
        return () if engine.leading else ((b"crater-standby", b"true"), (b"crater-revision", b"%d" % engine.shown.revision))

    return Gate(HotPaths(app, tasks, agents), guard, count, marks)


async def _on_crater_error(_: Request, error: Exception) -> Response:
    return problem(cast(CraterError, error))


async def _on_invalid(_: Request, error: Exception) -> Response:
    return problem(invalid(list(cast(RequestValidationError, error).errors())))


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = cast(HTTPException, error).status_code
    if status == 404:
        return plain_problem(404, "not_found", f"no such path: {request.url.path[:200]}")
    if status == 405:
        return plain_problem(405, "method_not_allowed", f"{request.method} is not possible here")
    if status == 413:
        return too_large()
    return plain_problem(status, "http_error", str(cast(HTTPException, error).detail))


async def _on_fault(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return plain_problem(500, "internal_error", "a fault in the scheduler; its log has the details")
