"""A real scheduler, two real agents, and a wire that can be cut: one task never runs on both sides of the cut."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from agent_harness import poll_until, start_agent
from harness import start_scheduler


class Wire:
    """Carries connections to a port; while it is cut, it takes them and swallows what is sent."""

    def __init__(self, target: int) -> None:
        self._target, self._cut = target, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._take, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def mend(self) -> None:
        self._cut.clear()

    def close(self) -> None:
        self._listener.close()

    def _take(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with source, sink:
            try:
                while data := source.recv(65536):
                    if not self._cut.is_set():
                        sink.sendall(data)
            except OSError:
                return


def test_a_task_moves_from_a_node_that_is_cut_off_and_never_runs_on_both(place: Path) -> None:
    told = place / "told"
    # Says every 20 ms which attempt it is; the one that is told to go on ends well.
    program = f"while [ ! -e {place}/go ]; do echo $CRATER_ATTEMPT >> {told}; sleep 0.02; done"
    with start_scheduler(place, heartbeat_interval="500ms", heartbeat_timeout="3s") as scheduler:
        wire = Wire(scheduler.port)
        first = start_agent(place, wire.url, "n1")
        client = httpx.Client(base_url=scheduler.url, trust_env=False, timeout=30)
        agents = [first]

        def task(name: str) -> dict[str, Any]:
            return client.get(f"/v1/tasks/{name}").json()

        try:
            poll_until(lambda: client.get("/v1/nodes").json()["nodes"], what="n1")
            body = {"name": "t", "project": "p", "command": ["sh", "-c", program], "retry": {"backoff": "1ms"}, "grace": "200ms"}
            body["resources"] = {"cpu": 0.5, "memory": "128MiB"}
            moves = client.post("/v1/tasks", json=body).json()["id"]
            stays = client.post("/v1/tasks", json={**body, "on_disconnect": "keep", "command": ["sleep", "600"]}).json()["id"]
            for name in (moves, stays):
                poll_until(lambda name=name: task(name)["status"] == "running", what="both run")
            agents.append(start_agent(place, scheduler.url, "n2"))
            poll_until(lambda: len(client.get("/v1/nodes").json()["nodes"]) == 2, what="n2")
            wire.cut()
            poll_until(lambda: task(moves)["status"] == "running" and task(moves)["node"] == "n2", 20, "it runs elsewhere")
            assert (task(stays)["node"], task(stays)["status"]) == ("n1", "running")
            wire.mend()
            poll_until(lambda: client.get("/v1/nodes/n1").json()["status"] == "ready", 20, "n1 is back")
            time.sleep(1)  # Long enough for a copy on n1 to be heard, if there were one.
            (place / "go").touch()
            poll_until(lambda: task(moves)["status"] == "succeeded", what="its end")
            attempts = told.read_text().split()
            assert attempts == ["1"] * attempts.count("1") + ["2"] * attempts.count("2"), "one ended before the other began"
            assert (task(moves)["attempt"], attempts.count("2") > 0) == (2, True)
            kept = task(stays)
            assert (kept["node"], kept["status"], kept["attempt"], kept["reason"]) == ("n1", "running", 1, None)
        finally:
            client.close()
            wire.close()
            for agent in agents:
                agent.stop()
