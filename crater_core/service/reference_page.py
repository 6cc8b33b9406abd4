"""The page at `/docs`: every call and every body of the API, written from its schema, with nothing fetched from anywhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }
table { border-collapse: collapse; width: 100%; margin: .4em 0 1.6em }
td { padding: .3em .8em .3em 0; border-bottom: 1px solid #ddd; vertical-align: top }
td:first-child { white-space: nowrap; width: 26em }
code { font: 13px ui-monospace, monospace }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } td { border-color: #333 } a { color: #8ab4f8 } }
"""
Schema = Mapping[str, Any]


class ReferencePage:
    """`schema` gives the OpenAPI schema, when it is first asked for."""

    def __init__(self, schema: Callable[[], Schema]) -> None:
        self._schema = schema
        self._page = b""
        style = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
        self._policy = (
            f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/docs", self.show, methods=["GET"], include_in_schema=False)
        return router

    async def show(self) -> Response:
        self._page = self._page or page_of(self._schema()).encode()
        headers = {"Content-Security-Policy": self._policy}
        return Response(self._page, headers=headers, media_type="text/html; charset=utf-8")


def page_of(schema: Schema) -> str:
    title = escape(f"{schema['info']['title']} {schema['info']['version']}")
    calls = [(method, path, call) for path, methods in schema["paths"].items() for method, call in methods.items()]
    models = sorted(schema["components"]["schemas"].items())
    return "".join(
        (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style><h1>{title}</h1>',
            f"<p>{escape(schema['info'].get('description', ''))} ",
            'The same for programs: <a href="openapi.json">openapi.json</a>.</p><h2>Calls</h2>',
            _table((f"<code>{method.upper()} {escape(path)}</code>", _call(call)) for method, path, call in calls),
            "<h2>Bodies</h2>",
            *(_model(name, model) for name, model in models if "properties" in model),
            "</html>",
        )
    )


def _call(call: Schema) -> str:
    asked = [f"<code>{escape(one['name'])}</code> ({one['in']})" for one in call.get("parameters", ())]
    parts = [escape(call.get("summary", ""))]
    if asked:
        parts.append(f"Parameters: {', '.join(asked)}.")
    for content in call.get("requestBody", {}).get("content", {}).values():
        parts.append(f"Takes {_type(content.get('schema', {}))}.")
    for code, answer in call.get("responses", {}).items():
        for kind, content in answer.get("content", {}).items() if code.startswith("2") else ():
            parts.append(f"{code}: {_type(content['schema']) if content.get('schema') else escape(kind)}.")
    return "<br>".join(parts)


def _model(name: str, model: Schema) -> str:
    needed = model.get("required", ())
    rows = (
        (
            f"<code>{escape(field)}</code>{' *' if field in needed else ''}",
            f"{_type(what)}<br>{escape(what.get('description', ''))}" if what.get("description") else _type(what),
        )
        for field, what in model["properties"].items()
    )
    about = escape(model.get("description", "")).replace("\n\n", "<br>")
    return f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{about}</p>{_table(rows)}'


def _type(what: Schema) -> str:
    """One type in words, with a link where it is a body of its own."""
    if "$ref" in what:
        name = escape(what["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "enum" in what:
        return " | ".join(f"<code>{escape(str(one))}</code>" for one in what["enum"])
    several = what.get("anyOf") or what.get("allOf")
    if several:
        return " or ".join(_type(one) for one in several)
    if what.get("type") == "array":
        return f"list of {_type(what.get('items', {}))}"
    return escape(str(what.get("type", "anything")))


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return f"<table>{''.join(f'<tr><td>{left}<td>{right}' for left, right in rows)}</table>"
