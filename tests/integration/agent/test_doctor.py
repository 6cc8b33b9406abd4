"""The doctor tells what is wrong with a node or a cluster, and how to put it right; its exit code says whether anything is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvml
import pytest
import yaml
from agent_harness import AgentProcess, agent_config, poll_until, start_agent
from harness import SchedulerProcess, start_scheduler

from crater_core.client import CraterClient
from crater_core.findings import Finding


def _doctor(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, dict[str, Finding]]:
    """The exit code, and the worst finding of each check."""
    command = [sys.executable, "-m", "crater_core.cli", "doctor", "--json", *arguments]
    env = {**os.environ, "NO_PROXY": "*", **(environ or {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    order = ["pass", "warn", "fail"]
    found = sorted((Finding(**finding) for finding in json.loads(done.stdout)), key=lambda finding: order.index(finding.verdict))
    assert done.returncode == int(any(finding.verdict == "fail" for finding in found))
    assert all(bool(finding.fix) == (finding.verdict != "pass") for finding in found), "what is wrong comes with its fix"
    return done.returncode, {finding.check: finding for finding in found}


def _write(place: Path, scheduler_url: str, **overrides: Any) -> str:
    file = place / "doctor.yaml"
    file.write_text(yaml.safe_dump(agent_config(place, scheduler_url, **overrides)))
    return str(file)


@pytest.fixture
def cluster(place: Path) -> Iterator[tuple[SchedulerProcess, AgentProcess]]:
    scheduler = start_scheduler(place, heartbeat_interval="1s", heartbeat_timeout="4s")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    agent = start_agent(place, scheduler.url, listen=listen)
    with CraterClient(scheduler.url) as client:
        poll_until(lambda: client.nodes(), what="the node registered")
    yield scheduler, agent
    agent.stop()
    scheduler.stop()


def test_a_node_and_a_cluster_that_are_well(cluster: tuple[SchedulerProcess, AgentProcess]):
    scheduler, agent = cluster
    code, node = _doctor("--config", str(agent.config_file))
    assert code == 0, node
    assert {"configuration", "pools", "GPU driver", "cgroups", "disk", "scheduler", "clock", "token", "metrics port"} <= set(node)
    assert node["token"].saw == "none needed; n1 is registered"
    assert "the agent runs and serves" in node["metrics port"].saw
    code, found = _doctor("--cluster", environ={"CRATER_ENDPOINT": scheduler.url})
    assert (code, found["nodes"].saw, found["tasks"].verdict) == (0, "1 heard from in the last 15 s", "pass")


def test_a_cluster_with_a_lost_node_and_a_task_that_waits_for_nothing(cluster: tuple[SchedulerProcess, AgentProcess]):
    scheduler, agent = cluster
    with CraterClient(scheduler.url) as client:
        task = client.submit({"name": "t", "project": "p", "command": ["true"], "node_labels": {"zone": "moon"}})
        agent.kill()
        poll_until(lambda: client.node("n1").status == "lost")
        poll_until(lambda: (reason := client.task(task.id).reason) and reason.code in ("no_node_ready", "labels_mismatch"))
    code, found = _doctor("--cluster", environ={"CRATER_ENDPOINT": scheduler.url})
    assert code == 1
    assert found["nodes"].saw.startswith("lost: n1")
    assert task.id in found["stuck tasks"].saw


def test_a_node_whose_agent_would_not_work(place: Path, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        pools = [{"name": "g", "type": "gpu", "devices": "all"}, {"name": "c", "type": "cpu", "cores": 9_999}]
        more: dict[str, Any] = {"run_as": "nobody-at-all"} if os.geteuid() == 0 else {}
        file = _write(place, "http://127.0.0.1:1", listen=listen, resource_pools=pools, mount_roots=["/no/such/data"], **more)
        code, found = _doctor("--config", file)
    assert code == 1
    failed = {name for name, finding in found.items() if finding.verdict == "fail"}
    expected = {"pools", "GPU driver", "mounts", "scheduler", "metrics port"}
    assert expected <= failed
    assert "9999" in found["pools"].saw
    assert "refused" in found["scheduler"].saw
    assert more == {} or "no user is called nobody-at-all" in found["user of tasks"].saw


def test_a_wrong_token_is_told_from_a_missing_one(place: Path):
    from hashlib import sha256

    tokens = [{"name": "nodes", "role": "agent", "sha256": sha256(b"right").hexdigest()}]
    tokens += [{"name": "eyes", "role": "viewer", "sha256": sha256(b"eyes").hexdigest()}]
    with start_scheduler(place, tokens=tokens) as scheduler:
        said = {}
        for token in (None, "wrong", "eyes", "right"):
            file = _write(place, scheduler.url, token=token)
            said[token] = _doctor("--config", file, environ={"CRATER_TOKEN": ""})[1]["token"]
    assert [finding.verdict for finding in said.values()] == ["fail", "fail", "fail", "pass"]
    assert said[None].saw == "the scheduler wants a token"
    assert said["wrong"].saw == "the scheduler does not know this token"


def test_a_driver_that_is_not_loaded_and_one_that_works(place: Path, tmp_path: Path):
    library = nvml.build(tmp_path)
    file = _write(place, "http://127.0.0.1:1", resource_pools=[{"name": "g", "type": "gpu", "devices": "all"}])
    nvml.write(tmp_path / "gpus", ["init 9"])
    _, found = _doctor("--config", file, environ=nvml.environ(library, tmp_path / "gpus"))
    assert "the NVIDIA kernel driver is not loaded" in found["GPU driver"].saw
    nvml.write(tmp_path / "gpus", [nvml.gpu("GPU-a")])
    _, found = _doctor("--config", file, environ=nvml.environ(library, tmp_path / "gpus"))
    assert found["GPU driver"].saw == "driver 570.86.15, 1 GPU(s): NVIDIA A100-SXM4-80GB"
