"""How the process starts, or says why it does not."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from harness import SchedulerProcess, free_port, start_scheduler

from .conftest import Api, FakeAgent


def run(*arguments: str, timeout_s: float = 30) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crater_core.service.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_help_teaches() -> None:
    text = run("--help").stdout
    for part in ("--config", "--check", "exit codes", "token new"):
        assert part in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heartbeat_timout: 30s", "heartbeat_timout: found an unknown key; expected `heartbeat_timeout` (did you mean that?)"),
        ("heartbeat_timeout: 30 parsecs", "heartbeat_timeout: found '30 parsecs'; expected a duration such as"),
        ("heartbeat_timeout: 1s", "heartbeat_timeout: found '1000 ms'; expected at least twice heartbeat_interval"),
        ("listen: 8080", "listen: found 8080; expected text"),
        ("listen: localhost", "listen: found 'localhost'; expected an address and a port"),
        ("listen: 0.0.0.0:8080", "listen: found '0.0.0.0:8080'; expected a loopback address, or tokens"),
        ("metrics: {port: yes}", "metrics.port: found true; expected a number"),
        ("metrics: {port: 99999}", "metrics.port: found 99999; expected at most 65535"),
        (
            "etcd_endpoints: [10.0.0.1]",
            "etcd_endpoints: found a list (1 entries); expected addresses such as http://10.0.0.1:2379",
        ),
        ("etcd_endpoints: [http://e:2379]\ndatabase_url: sqlite:///a", "expected either etcd_endpoints or database_url"),
        ("etcd: {user: a}", "etcd: found 'no etcd_endpoints beside it'; expected etcd_endpoints"),
        ("etcd_endpoints: [http://e:1]\netcd: {ca_file: /x}", "etcd_endpoints: found 'http://e:1'; expected https://"),
        ("database_url: mysql://u:secret@h/db", "found 'mysql://...@h/db'; expected sqlite:///PATH"),
        ("scheduling_policy: worst_fit", "scheduling_policy: found 'worst_fit'; expected one of:"),
        ("pools: {gpu: {strategy: x}}", "pools.gpu.strategy: found 'x'; expected one of:"),
        ("tokens: [{name: a, role: king, sha256: x}]", "tokens[0].role: found 'king'; expected 'admin', 'submitter'"),
        ("tokens: [{name: a, role: admin, sha256: x}]", "tokens[0].sha256: found 'x'; expected 64 hexadecimal digits"),
        ("quota_policies: {q: {limits: {gpu: many}}}", "quota_policies.q.limits.gpu: found 'many'"),
        ("queue: {project_weights: {vision: 0}}", "queue.project_weights.vision: found 0.0; expected a weight above 0"),
        ("queue: {passing: sometimes}", "queue.passing: found 'sometimes'; expected 'backfill', 'free' or 'none'"),
        ("log: {level: loud}", "log.level: found 'loud'; expected"),
        ("a: 1\na: 2", "a: found the key twice (line 2)"),
        ("[1, 2]", "found a list (2 entries); expected keys with values"),
        ("a: [", "broken YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_field_value_and_what_fits(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "scheduler.yaml"
    path.write_text(text)
    done = run("--config", str(path), "--check")
    assert done.returncode == 2
    assert message in done.stderr
    assert "scheduler.yaml" in done.stderr
    assert "secret" not in done.stderr


def test_a_strategy_of_another_distribution_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[crater.strategies]\ntheir_fit = theirs:TheirFit\n")
    (tmp_path / "theirs.py").write_text("class TheirFit:\n    def score(self, fits, rows, devices):\n        return 0 * rows\n")
    path = tmp_path / "scheduler.yaml"
    path.write_text("scheduling_policy: their_fit\n")
    assert "expected one of:" in run("--config", str(path), "--check").stderr
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("--config", str(path), "--check").returncode == 0
    (tmp_path / "theirs.py").write_text("broken here\n")
    done = run("--config", str(path), "--check")
    assert (done.returncode, "strategy their_fit of theirs cannot be loaded" in done.stderr) == (2, True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    done = run("--config", str(tmp_path / "nowhere.yaml"))
    assert (done.returncode, "nowhere.yaml: found no such file" in done.stderr) == (2, True)


def test_the_example_file_is_right() -> None:
    path = Path(__file__).parents[3] / "deploy" / "scheduler.yaml"
    assert run("--config", str(path), "--check").returncode == 0


def test_an_address_in_use_is_said_to_be_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = tmp_path / "scheduler.yaml"
        path.write_text(f"data_dir: {tmp_path}/data\nlisten: 127.0.0.1:{taken.getsockname()[1]}\n")
        done = run("--config", str(path))
    assert (done.returncode, "in use by another process" in done.stderr) == (4, True)


def test_a_metrics_port_in_use_is_said_to_be_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = tmp_path / "scheduler.yaml"
        port = taken.getsockname()[1]
        path.write_text(f"data_dir: {tmp_path}/data\nlisten: 127.0.0.1:{free_port()}\nmetrics: {{port: {port}}}\n")
        done = run("--config", str(path))
    assert (done.returncode, "metrics cannot be served" in done.stderr) == (4, True)


def test_an_unusable_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "crater.db").write_bytes(b"garbage" * 1000)
    path = tmp_path / "scheduler.yaml"
    path.write_text(f"data_dir: {tmp_path}/data\nlisten: 127.0.0.1:{free_port()}\nmetrics: {{enabled: false}}\n")
    done = run("--config", str(path))
    assert (done.returncode, "crater.db" in done.stderr) == (3, True)
    assert "Traceback" not in done.stderr


def test_a_second_scheduler_on_the_same_data_is_refused(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    own.append(start_scheduler(tmp_path))
    done = run("--config", str(own[0].config_path), "--listen", "127.0.0.1:0")
    assert (done.returncode, "in use by another scheduler" in done.stderr) == (3, True)


def test_a_made_token_opens_the_door(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    printed = run("token", "new", "alice", "--role", "submitter", "--project", "ml").stdout
    token = next(line.strip() for line in printed.splitlines() if line.strip().startswith("crater_"))
    entry = printed[printed.index("tokens:") :]
    scheduler = start_scheduler(tmp_path, **yaml.safe_load(entry))
    own.append(scheduler)
    assert token not in scheduler.config_path.read_text()
    assert httpx.post(f"{scheduler.url}/v1/tasks", json={}).status_code == 401
    assert Api(scheduler.url, token).submit(project="ml")["user"] == "alice"


def test_the_log_has_a_json_form_with_decisions(tmp_path: Path, own: list[SchedulerProcess]) -> None:
    path = tmp_path / "own.log"
    scheduler = start_scheduler(tmp_path, log={"level": "debug", "format": "json", "file": str(path)})
    own.append(scheduler)
    FakeAgent(scheduler.url, "n1").register()
    task = Api(scheduler.url).submit()
    scheduler.stop()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    decision = next(line["message"] for line in lines if task["id"] in line["message"])
    assert "placed on n1 by best_fit; candidates: n1=" in decision
