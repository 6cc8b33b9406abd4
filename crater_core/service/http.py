"""What every route needs: bodies read strictly, answers written once, errors as problem details."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import CraterError, InvalidRequest, Unauthenticated
from crater_core.service.auth import Identity
from crater_core.service.engine import Engine
from crater_core.wire.problems import problem_of

log = logging.getLogger("crater.http")
Body = TypeVar("Body", bound=BaseModel)
PROBLEM = "application/problem+json"
ERRORS_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class Hub:
    """What routes work with."""

    engine: Engine
    agents: httpx.AsyncClient
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int


class Invalid(InvalidRequest):
    """A body or parameter that does not fit its form: 422, unlike a request that is broken as a whole (400)."""


def identity_of(request: Request) -> Identity:
    return cast(Identity, request.scope["crater.identity"])


async def body_of(request: Request, model: type[Body], default: bytes = b"") -> Body:
    """The request's body as a model. Raises Invalid with the field at fault."""
    data = await request.body() or default
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False), data) from None


def invalid(errors: list[ErrorDetails], data: bytes = b"") -> CraterError:
    """Pydantic's complaints as one error: the first in words, all by field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return InvalidRequest(
            f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}" if data else "the body is missing"
        )
    listed = [{"field": _field(error), "message": _message(error)} for error in errors[:ERRORS_SHOWN_MAX]]
    where = listed[0]["field"]
    detail = f"{where}: {listed[0]['message']}" if where else listed[0]["message"]
    return Invalid(detail, field=where, errors=listed)


def _field(error: ErrorDetails) -> str:
    return ".".join(str(part) for part in error["loc"] if part not in ("body", "query", "path", "[key]"))


def _message(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return "no such field"
    if error["type"] == "missing":
        return "this field is missing"
    return error["msg"].removeprefix("Value error, ")[:1000]


def answer(view: BaseModel, status: int = 200) -> Response:
    return Response(view.model_dump_json(), status, media_type="application/json")


def answer_bytes(data: bytes, status: int = 200) -> Response:
    return Response(data, status, media_type="application/json")


def problem(error: CraterError) -> Response:
    body = problem_of(error)
    if isinstance(error, Invalid):
        body |= {"status": 422, "title": "InvalidRequest"}
    headers = {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else None
    if body["status"] == 503:
        headers = {"Retry-After": "1"}
    return problem_response(body, headers)


def problem_response(body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body, default=str), body["status"], headers, media_type=PROBLEM)


def plain_problem(status: int, code: str, detail: str, **facts: object) -> Response:
    """A problem that is no CraterError: a path that is not there, a body that is too large, a fault of our own."""
    title = code.replace("_", " ")
    body = {"type": f"urn:crater:{code}", "title": title, "status": status, "detail": detail, "retryable": status >= 500}
    return problem_response({**body, **facts})
