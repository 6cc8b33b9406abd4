"""Stands before every route: bounds the body, names the caller, counts, and adds the security headers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crater_core.errors import CraterError
from crater_core.service.auth import PUBLIC, Guard, Identity
from crater_core.service.http import plain_problem, problem

BODY_BYTES_MAX = 32 * 1024**2
_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cache-control", b"no-store"),
]
Count = Callable[[str, str, int], None]
Marks = Callable[[], Sequence[tuple[bytes, bytes]]]


class Gate:
    """ASGI middleware. `count(method, route, status)` hears of every answer; `marks` gives further headers for each."""

    def __init__(self, app: ASGIApp, guard: Guard, count: Count | None = None, marks: Marks = tuple) -> None:
        self._app, self._guard, self._count, self._marks = app, guard, count, marks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > BODY_BYTES_MAX:
                raise HTTPException(413)
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS, *self._marks()]
                self._counted(scope, message["status"])
            await send(message)

        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._refusal(scope, headers)
        if refusal is None:
            await self._app(scope, bounded, sending)
        else:
            await refusal(scope, receive, sending)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Response | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > BODY_BYTES_MAX:
            return too_large()
        if scope["path"] in PUBLIC:
            scope["crater.identity"] = Identity("", "viewer")
            return None
        try:
            scope["crater.identity"] = self._guard.identify(
                scope["method"], scope["path"], _text(headers, b"authorization"), _text(headers, b"crater-user")
            )
        except CraterError as error:
            return problem(error)
        return None

    def _counted(self, scope: Scope, status: int) -> None:
        if self._count is not None:
            route: Any = scope.get("route")
            self._count(scope["method"], scope.get("crater.route") or getattr(route, "path", "other"), status)


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return value.decode("latin-1") if value is not None else None


def too_large() -> Response:
    return plain_problem(413, "too_large", f"the body is over {BODY_BYTES_MAX // 1024**2} MiB", limit_bytes=BODY_BYTES_MAX)
