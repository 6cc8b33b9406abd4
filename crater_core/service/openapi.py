"""Describes routes that read and write their bodies themselves, so that the schema stays whole and the hot paths stay short."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from crater_core import __version__
from crater_core.wire.base import Outgoing

_REF = "#/components/schemas/{model}"
_PROBLEMS = {
    400: "the request is broken",
    401: "no token, or an unknown one",
    403: "the token does not reach that far, or the request is larger than its whole quota",
    404: "no such thing",
    405: "no such method",
    409: "a conflict with what is there",
    413: "the body is over 32 MiB",
    422: "a field is wrong",
    503: "the store or a node cannot be reached; try again",
}

_bodies: dict[str, type[BaseModel]] = {}
"""What the described routes take, by name."""


class Problem(Outgoing):
    """RFC 9457 problem details. Further members carry the facts: `field`, `reason`, amounts."""

    type: str
    title: str
    status: int
    detail: str
    retryable: bool = False


def described(
    summary: str,
    gives: type[BaseModel] | str | None,
    status: int = 200,
    takes: type[BaseModel] | None = None,
    headers: dict[str, str] | None = None,
    also: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Keyword arguments for `add_api_route`. `gives` is a model, or the media type of an answer that is none."""
    content: dict[str, Any] = {"model": gives} if isinstance(gives, type) else {"content": {gives: {}}} if gives else {}
    responses: dict[int | str, dict[str, Any]] = {
        code: {"content": {"application/problem+json": {"schema": {"$ref": _REF.format(model="Problem")}}}, "description": text}
        for code, text in _PROBLEMS.items()
    }
    for code in (status, *also):
        responses[code] = {"description": "done", **content}
    extra: dict[str, Any] = {}
    if takes is not None:
        _bodies[takes.__name__] = takes
        schema = {"$ref": _REF.format(model=takes.__name__)}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if headers:
        extra["parameters"] = [
            {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string", "maxLength": 200}}
            for name, text in headers.items()
        ]
    return {
        "summary": summary,
        "status_code": status,
        "response_class": Response,
        "response_model": None,
        "responses": responses,
        "openapi_extra": extra or None,
    }


def schema_of(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI schema, with the bodies that routes read themselves."""
    schema = get_openapi(
        title="Crater scheduler",
        version=__version__,
        description="Pools of GPU, CPU, memory and disk: submit tasks, watch them, see who holds what.",
        routes=app.routes,
    )
    _, definitions = models_json_schema([(model, "validation") for model in (*_bodies.values(), Problem)], ref_template=_REF)
    components: dict[str, Any] = schema.setdefault("components", {})
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    for name, definition in definitions.get("$defs", {}).items():
        schemas.setdefault(name, definition)
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}]
    return schema
