"""Keeps what a container engine is asked for, and answers as one would: for what the tests' machine does not have (GPUs)."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


@dataclass
class EngineStandIn:
    info: dict[str, Any] = field(default_factory=dict)
    refuse_start: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of create calls; each container ends at once with exit code 0."""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = re.sub(r"^/v[\d.]+", "", path.partition("?")[0])
        if path == "/version":
            return 200, {"ApiVersion": "1.41", "Version": "stand-in"}
        if path == "/info":
            return 200, {"ServerVersion": "stand-in", **self.info}
        if path.startswith("/images/"):
            return 200, {"Id": "sha256:1", "Config": {"Cmd": ["true"], "WorkingDir": "/w"}}
        if path == "/containers/json" or path == "/events":
            return 200, []
        if path == "/containers/create":
            self.created.append(json.loads(body))
            return 201, {"Id": "c1", "Warnings": []}
        if path.endswith("/start"):
            return (500, {"message": self.refuse_start}) if self.refuse_start else (204, None)
        if path.endswith("/json"):
            state = {"Running": False, "Pid": 0, "ExitCode": 0, "StartedAt": "2026-01-01T00:00:00Z", "OOMKilled": False}
            return 200, {"Id": "c1", "Name": "/c1", "State": state, "Config": {"Labels": {}, "Tty": False}}
        return 204, None


class _Handler(BaseHTTPRequestHandler):
    engine: EngineStandIn
    gone: threading.Event

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, content = self.engine.answer(self.command, self.path, body)
        data = b"" if content is None else json.dumps(content).encode()
        if "/logs" in self.path:
            status, data = 200, b""
        self.send_response(status)
        if "/events" in self.path:
            # A stream that says nothing, for as long as the engine is there.
            self.end_headers()
            self.wfile.flush()
            self.gone.wait(60)
            return
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _serve

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that has hung up is none."""


@contextmanager
def engine_stand_in(socket: Path, **fields: Any) -> Iterator[EngineStandIn]:
    stand_in, gone = EngineStandIn(**fields), threading.Event()
    server = _Server(str(socket), type("Handler", (_Handler,), {"engine": stand_in, "gone": gone}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        gone.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
