"""The agent's own port: metrics, health, and reading what tasks wrote."""

from __future__ import annotations

import sys
import threading
import time

import httpx
import pytest
from agent_harness import SchedulerStandIn, poll_until


def _get(url: str, **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False) as client:
        return client.get(url, headers=headers)


def test_a_log_is_read_by_offset_and_says_when_it_is_complete(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["sh", "-c", "printf 'hello world'"])
    scheduler.final("a")
    first = scheduler.read_log("a", offset=0)
    assert (first.content, first.headers["crater-next-offset"], first.headers["crater-complete"]) == (
        b"hello world",
        "11",
        "true",
    )
    assert scheduler.read_log("a", offset=6).content == b"world"
    past = scheduler.read_log("a", offset=100)
    assert (past.content, past.headers["crater-next-offset"]) == (b"", "100")


def test_a_reader_that_waits_gets_the_first_bytes_as_they_come(start, place, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["sh", "-c", f"until [ -e {place}/go ]; do sleep 0.01; done; echo now; sleep 60"])
    scheduler.running("a")
    threading.Timer(0.3, (place / "go").touch).start()
    began = time.monotonic()
    part = scheduler.read_log("a", wait=20)
    assert (part.content, part.headers["crater-complete"]) == (b"now\n", "false")
    assert time.monotonic() - began < 5


def test_a_reader_that_waits_is_released_by_the_end(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["sleep", "0.5"])
    scheduler.running("a")
    part = scheduler.read_log("a", wait=20)
    assert (part.content, part.headers["crater-complete"]) == (b"", "true")


def _begin(part: httpx.Response) -> int:
    """Where in the log the first byte of this part stands."""
    return int(part.headers["crater-next-offset"]) - len(part.content)


def test_a_long_log_loses_its_oldest_part_and_keeps_its_offsets(start, scheduler: SchedulerStandIn):
    start(logs={"max_bytes": "1MiB"})
    script = "import sys, time\nfor i in range(400_000): sys.stdout.write(f'{i:09}\\n')\nsys.stdout.flush()\ntime.sleep(60)\n"
    scheduler.give("a", [sys.executable, "-c", script])
    poll_until(lambda: scheduler.read_log("a", offset=3_999_990).content == b"000399999\n" or None, what="all of it written")
    # What is left begins at the offset that it was written at: its line is its offset by ten. Parts go while it is written too.
    part = poll_until(lambda: _begin(p := scheduler.read_log("a")) >= 4_000_000 - 1024**2 and p, what="the oldest part dropped")
    at = _begin(part)
    skip = (10 - at % 10) % 10
    assert int(part.content[skip : skip + 9]) == (at + skip) // 10


@pytest.mark.parametrize(
    "path", ["/logs/../agent.yaml", "/logs/..%2f..%2fetc%2fpasswd", "/logs/a%2f..%2fa", "/logs/", "/logs/.hidden", "/logs/a%00b"]
)
def test_no_path_leads_out_of_the_logs(start, scheduler: SchedulerStandIn, path: str):
    start()
    declaration = scheduler.declaration
    answer = _get(declaration.agent_url + path, Authorization=f"Bearer {declaration.agent_secret}")
    assert answer.status_code == 404


def test_logs_are_for_the_scheduler_alone(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["echo", "x"])
    scheduler.final("a")
    url = f"{scheduler.declaration.agent_url}/logs/a"
    assert _get(url).status_code == 401
    assert _get(url, Authorization="Bearer wrong").json()["type"] == "urn:crater:unauthenticated"


def test_a_wrong_number_is_named(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["echo", "x"])
    scheduler.final("a")
    declaration = scheduler.declaration
    answer = _get(f"{declaration.agent_url}/logs/a?offset=-1", Authorization=f"Bearer {declaration.agent_secret}")
    assert (answer.status_code, answer.json()["field"]) == (400, "offset")


def test_health_and_metrics_need_no_secret(start, scheduler: SchedulerStandIn):
    start(simulated_gpus=[{"model": "Test GPU", "gpu_type": "test", "memory": "8GiB"}], resource_pools=None)
    scheduler.give("a", ["sleep", "60"])
    scheduler.running("a")
    url = scheduler.declaration.agent_url
    health = _get(f"{url}/health").json()
    assert (health["status"], health["node"], health["registered"], health["running"]) == ("ok", "n1", True, 1)
    text = _get(f"{url}/metrics").text
    assert 'crater_node_memory_total_bytes{node="n1"}' in text
    assert 'crater_gpu_memory_total_mib{gpu_type="test",index="0",node="n1",simulated="true",uuid="GPU-SIM-n1-0"} 8192.0' in text
    assert 'crater_task_memory_limit_bytes{allocation="a",name="name-a",node="n1",task="task-a"}' in text
    assert 'crater_node_tasks_running{node="n1"} 1.0' in text
    assert 'crater_node_scheduler_round_trip_seconds{node="n1"} 0.' in text


def test_a_replica_is_ready_when_it_answers_and_fails_when_it_stops_to(start, place, scheduler: SchedulerStandIn):
    start()
    replica = (
        "import http.server, os, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        f"        self.send_response(500 if os.path.exists('{place}/ill') else 200); self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    port = int(str(time.monotonic_ns())[-4:]) + 20_000
    health = {"path": "/health", "interval_ms": 100, "timeout_ms": 1_000, "failures_max": 3}
    scheduler.give("a", [sys.executable, "-c", replica, "{port}"], ports=[port], health=health)
    poll_until(lambda: any(report.ready for report in scheduler.reports_of("a")), what="ready")
    (place / "ill").touch()
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value) == ("failed", "unhealthy")
    assert end.reason.facts == {"failures": 3, "why": "it answers with status 500"}


def test_the_node_is_measured_at_the_interval_of_the_file(start, scheduler: SchedulerStandIn):
    start(sample_interval="5s")
    url = f"{scheduler.declaration.agent_url}/metrics"

    def measured() -> str | None:
        text = _get(url).text
        return text if "crater_node_cpu_use_ratio" in text else None

    text = poll_until(measured, 30, "a second sample")
    said = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("crater_node"))
    assert float(said['crater_node_context_switches_per_second{node="n1"}']) > 0
