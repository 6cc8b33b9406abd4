"""The read-only page at `/`: one file, under a policy that lets nothing else run in it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter
from starlette.responses import Response


class ConsolePage:
    """Its script and style are allowed by their hashes; it talks to this scheduler alone."""

    def __init__(self) -> None:
        page = (resources.files("crater_core.service") / "console" / "index.html").read_text("utf-8")
        self._page = page.encode()
        script, style = _hash_of("script", page), _hash_of("style", page)
        # The bars set their own width from script, which a style hash does not forbid; attributes in markup stay forbidden.
        self._policy = (
            f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def router(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/", self.show, methods=["GET"], include_in_schema=False)
        return router

    async def show(self) -> Response:
        headers = {"Content-Security-Policy": self._policy}
        return Response(self._page, headers=headers, media_type="text/html; charset=utf-8")


def _hash_of(tag: str, page: str) -> str:
    found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found is not None, f"the console page has no <{tag}>"
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
