"""A small real image registry over HTTP, for pulls without a network: one image, at a pace and for users that the test sets."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Registry:
    layer: bytes
    """A tar archive."""
    login: tuple[str, str] | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    """The layer is sent in two halves; the second waits for this."""
    half_sent: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def __post_init__(self) -> None:
        self.blob = gzip.compress(self.layer, 1)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["echo", "from the image"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(self.layer)]},
        }
        self.config = json.dumps(config).encode()
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": {
                    "mediaType": "application/vnd.docker.container.image.v1+json",
                    "size": len(self.config),
                    "digest": _digest(self.config),
                },
                "layers": [
                    {
                        "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                        "size": len(self.blob),
                        "digest": _digest(self.blob),
                    }
                ],
            }
        ).encode()

    def name(self, tag: str = "1") -> str:
        return f"127.0.0.1:{self.port}/team/tool:{tag}"


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        registry = self.registry
        if registry.login is not None:
            wanted = base64.b64encode(":".join(registry.login).encode()).decode()
            if self.headers.get("Authorization") != f"Basic {wanted}":
                self._answer(401, b"{}", "application/json", {"WWW-Authenticate": 'Basic realm="stand-in"'})
                return
        last = self.path.rpartition("/")[2]
        if self.path == "/v2/":
            self._answer(200, b"{}", "application/json")
        elif "/manifests/" in self.path and last in ("1", _digest(registry.manifest)):
            self._answer(200, registry.manifest, MANIFEST, {"Docker-Content-Digest": _digest(registry.manifest)})
        elif last == _digest(registry.config):
            self._answer(200, registry.config, "application/octet-stream")
        elif last == _digest(registry.blob):
            self._answer(200, registry.blob, "application/octet-stream")
        else:
            body = json.dumps({"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}).encode()
            self._answer(404, body, "application/json")

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            if body is self.registry.blob:
                half = len(body) // 2
                self.wfile.write(body[:half])
                self.wfile.flush()
                self.registry.half_sent.set()
                self.registry.gate.wait(60)
                body = body[half:]
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def registry(layer: bytes, login: tuple[str, str] | None = None) -> Iterator[Registry]:
    stand_in = Registry(layer, login)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"registry": stand_in}))
    server.daemon_threads = True
    stand_in.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        stand_in.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
