"""Output of tasks, read through the scheduler from whoever has it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from harness import SchedulerProcess, free_port

from .conftest import Api, FakeAgent

SECRET = "the agent's own"


class _LogServer(BaseHTTPRequestHandler):
    """An agent's port: the output of every allocation is ten letters."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        if self.headers["Authorization"] != f"Bearer {SECRET}":
            self.send_error(401)
            return
        offset = int(asked["offset"])
        text = (f"{asked['stream']}:" + "abcdefghij").encode()[offset : offset + int(asked["limit"])]
        self.send_response(200)
        self.send_header("Crater-Next-Offset", str(offset + len(text)))
        self.send_header("Crater-Complete", "true")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def agent_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _LogServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def placed(scheduler: SchedulerProcess, node: str, url: str) -> tuple[Api, FakeAgent, str]:
    agent = FakeAgent(scheduler.url, node, agent_url=url, agent_secret=SECRET)
    agent.register()
    api = Api(scheduler.url)
    return api, agent, api.submit(pools=[f"{node}-cpu"])["id"]


def test_output_comes_from_the_agent_that_has_it(scheduler: SchedulerProcess, agent_url: str) -> None:
    api, agent, task = placed(scheduler, "logs-1", agent_url)
    answer = api.http.get(f"/v1/tasks/{task}/logs", params={"offset": 7, "limit": 3, "stream": "stdout"})
    assert (answer.status_code, answer.content) == (200, b"abc")
    assert (answer.headers["crater-next-offset"], answer.headers["crater-complete"]) == ("10", "true")
    agent.run(task)
    assert api.http.get(f"/v1/tasks/{task}/logs", params={"stream": "stderr"}).content == b"stderr:abcdefghij"


def test_an_agent_that_cannot_be_reached_is_a_503_with_its_node(scheduler: SchedulerProcess) -> None:
    api, _, task = placed(scheduler, "logs-2", f"http://127.0.0.1:{free_port()}")
    answer = api.http.get(f"/v1/tasks/{task}/logs")
    assert (answer.status_code, answer.json()["node"]) == (503, "logs-2")
    assert "cannot be reached" in answer.json()["detail"]


def test_a_task_that_has_not_run_has_no_output_yet(scheduler: SchedulerProcess, agent_url: str) -> None:
    api, _agent, _ = placed(scheduler, "logs-3", agent_url)
    task = api.submit(pools=["logs-3-cpu"], resources={"cpu": 8})["id"]
    answer = api.http.get(f"/v1/tasks/{task}/logs")
    assert (answer.content, answer.headers["crater-complete"], answer.headers["crater-next-offset"]) == (b"", "false", "0")
    api.http.post(f"/v1/tasks/{task}/cancel")
    assert api.http.get(f"/v1/tasks/{task}/logs").headers["crater-complete"] == "true"


def test_an_allocation_of_another_task_is_not_shown(scheduler: SchedulerProcess, agent_url: str) -> None:
    api, _agent, task = placed(scheduler, "logs-4", agent_url)
    other = api.submit(pools=["logs-4-cpu"])["allocation"]
    mine = api.task(task)["allocation"]
    assert api.http.get(f"/v1/tasks/{task}/logs", params={"allocation": mine}).status_code == 200
    for wrong in (other, "a000", "../../etc/passwd"):
        assert api.http.get(f"/v1/tasks/{task}/logs", params={"allocation": wrong}).status_code == 404
