"""Services through the client: deployed, waited for, called in turn, and what holds them up."""

from __future__ import annotations

import sys

import pytest
from harness import wait_until

from crater_core.client import ServiceCaller
from crater_core.errors import NotFound, Unavailable

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/broken": return self.send_error(503)
        self.send_response(200); self.end_headers(); self.wfile.write(sys.argv[1].encode())
    def do_POST(self):
        os._exit(1)
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def a_service(name: str, **fields: object) -> dict[str, object]:
    small = {"cpu": 0.2, "memory": "64MiB"}
    health = {"path": "/health", "interval": "200ms", "timeout": "5s", "failures": 10}
    return {"name": name, "command": [sys.executable, "-c", SERVER, "{port}"], "resources": small, "health": health} | fields


def test_replicas_are_called_in_turn_and_one_that_dies_is_passed_over(world):
    world.client.deploy(a_service("web", replicas=2))
    ready = world.client.wait_service("web", 60)
    assert (ready.status, ready.ready) == ("ready", 2)
    with ServiceCaller(world.client, "web", patience_s=20) as caller:
        ports = {caller.request("GET", "/who").text for _ in range(4)}
        assert ports == {url.rpartition(":")[2] for url in caller.replicas()}
        with pytest.raises(Unavailable, match="it is not sent again because it may have taken effect"):
            caller.request("POST", "/die")
        assert {caller.request("GET", "/who").text for _ in range(4)} & ports
        with pytest.raises(Unavailable, match="answered HTTP 503"):
            ServiceCaller(world.client, "web", patience_s=0.2).request("GET", "/broken")
    scaled = world.client.scale("web", 1, "quiet")
    assert scaled.replicas == 1
    assert world.client.wait_service("web", 60).ready == 1
    world.client.remove_service("web")

    def gone() -> bool:
        try:
            return world.client.service("web").removed and False
        except NotFound:
            return True

    wait_until(gone, 30)


def test_a_service_that_cannot_start_says_why_when_the_time_is_over(world):
    world.client.deploy(a_service("broken", command=["false"], replicas=1))
    wait_until(lambda: list(world.client.tasks(service="broken", status=["failed"])), 30)
    with pytest.raises(TimeoutError, match=r"service broken has 0 of 1 replicas ready.*It ended with exit code 1"):
        world.client.wait_service("broken", 0.1)
    with (
        ServiceCaller(world.client, "broken", patience_s=0.1) as caller,
        pytest.raises(Unavailable, match="service broken did not answer: no replica is ready"),
    ):
        caller.request("GET", "/")
    world.client.remove_service("broken")
