"""A file that is wrong is refused at start: exit code 2, with the field, the value found and what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from agent_harness import agent_config

CPU = {"name": "c", "type": "cpu", "cores": 1}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"scheduler_endpoint": None}, "agent-n1.yaml: scheduler_endpoint: found nothing; expected a value"),
        ({"scheduler_endpoint": "host:80"}, "scheduler_endpoint: found 'host:80'; expected a URL such as"),
        ({"scheduler_endpont": "http://a"}, "scheduler_endpont: found an unknown key; expected `scheduler_endpoint`"),
        ({"resource_pools": [{**CPU, "cores": 4096}]}, "resource_pools[0].cores: found 4096; expected at most"),
        ({"resource_pools": [{**CPU, "cores": "two"}]}, "resource_pools[0].cores: found 'two'; expected a number"),
        ({"resource_pools": [{**CPU, "core": 1}]}, "resource_pools[0].core: found an unknown key; expected `cores`"),
        ({"resource_pools": [{**CPU, "reserved_cores": 1}]}, "expected reserved_cores below cores (1)"),
        ({"resource_pools": [CPU, {**CPU, "name": "d"}]}, "expected one cpu pool a node; 'c' and 'd' are two"),
        (
            {"resource_pools": [{"type": "memory", "size_gb": "4GiB"}]},
            "resource_pools[0].size_gb: found '4GiB'; expected a number of GB",
        ),
        (
            {"resource_pools": [{"type": "memory", "size_gb": 900_000}]},
            "resource_pools[0].size_gb: found 900000; expected at most",
        ),
        ({"resource_pools": [{"type": "disk", "path": "/", "size_gb": 90_000_000}]}, "the size of the file system of /"),
        ({"resource_pools": [{"type": "tape"}]}, "expected a type of gpu, cpu, memory or disk in each pool; number 0 has 'tape'"),
        (
            {"resource_pools": [{"type": "gpu", "devices": [7]}]},
            "resource_pools[0].devices: found 7; expected no device, as there is none",
        ),
        (
            {"resource_pools": [{"type": "gpu", "devices": [0, 2]}], "simulated_gpus": [{"count": 2}]},
            "resource_pools[0].devices: found 2; expected indices of devices that are there: [0, 1]",
        ),
        (
            {"resource_pools": [{"type": "gpu", "devices": [0]}, {"name": "h", "type": "gpu", "devices": [0, 1]}]},
            "expected each device in one pool; device 0 of 'h' is also in 'gpu-pool'",
        ),
        (
            {"gpu_sharing": {"compute_mode": "magic"}},
            "gpu_sharing.compute_mode: found 'magic'; expected 'mps', 'time_slice' or 'exclusive'",
        ),
        (
            {"gpu_sharing": {"memory_overcommit_ratio": 0.5}},
            "gpu_sharing.memory_overcommit_ratio: found 0.5; expected at least 1",
        ),
        (
            {"gpu_sharing": {"compute_mode": "mps"}},
            "gpu_sharing.compute_mode: found 'mps'; expected `enabled: true` beside it, or exclusive",
        ),
        (
            {"gpu_sharing": {"enabled": False, "compute_mode": "time_slice"}},
            "gpu_sharing.compute_mode: found 'time_slice'; expected `enabled: true` beside it, or exclusive",
        ),
        (
            {"gpu_sharing": {"enabled": False, "memory_overcommit_ratio": 1.2}},
            "gpu_sharing.memory_overcommit_ratio: found 1.2; expected `enabled: true` beside it, or 1",
        ),
        (
            {"gpu_sharing": {"enabled": True, "compute_mode": "exclusive", "memory_overcommit_ratio": 1.2}},
            "gpu_sharing.memory_overcommit_ratio: found 1.2; expected 1, or compute_mode time_slice or mps",
        ),
        (
            {"gpu_sharing": {"enabled": True, "memory_overcommit": 1.2}},
            "gpu_sharing.memory_overcommit: found an unknown key; expected `memory_overcommit_ratio`",
        ),
        ({"gpu_sharing": "mps"}, "gpu_sharing: found 'mps'; expected"),
        ({"sample_interval": "2s"}, "sample_interval: found '2s'; expected from 5s to 5m"),
        ({"sample_interval": "15 parsecs"}, "sample_interval: found '15 parsecs'; expected a duration such as"),
        ({"listen": "9090"}, "listen: found '9090'; expected HOST:PORT"),
        ({"node_name": "a/b"}, "node_name: found 'a/b'; expected a name of letters"),
        ({"token": "x", "token_file": "/y"}, "expected token or token_file, not both"),
        ({"token_file": "/no/such"}, "token_file: found"),
        ({"run_as": "nobody-of-that-name"}, "run_as: found 'nobody-of-that-name'; expected a user of this machine"),
        ({"data_dir": "/proc/crater"}, "data_dir: found '/proc/crater'; expected a directory this agent may write to"),
        ({"ports": {"first": 65_000, "count": 1_000}}, "expected first + count at most 65536"),
        ({"env_profiles": {"p": {"A": 1}}}, "env_profiles.p.A"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, overrides: dict[str, object], says: str):
    file = tmp_path / "agent-n1.yaml"
    file.write_text(yaml.safe_dump(agent_config(tmp_path, "http://127.0.0.1:1", **overrides)))
    command = [sys.executable, "-m", "crater_agent", "--config", str(file)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (answer.returncode, says in answer.stderr) == (2, True), answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_a_secret_in_a_wrong_place_is_not_shown(tmp_path: Path):
    file = tmp_path / "agent.yaml"
    file.write_text("scheduler_endpoint: http://a:1\ntoken: [s3cr3t]\n")
    answer = subprocess.run(
        [sys.executable, "-m", "crater_agent", "--config", str(file)], capture_output=True, text=True, timeout=30
    )
    assert (answer.returncode, "s3cr3t" in answer.stderr) == (2, False)


def test_check_shows_what_would_be_offered_and_ends(tmp_path: Path):
    file = tmp_path / "agent.yaml"
    file.write_text(yaml.safe_dump(agent_config(tmp_path, "http://127.0.0.1:1")))
    command = [sys.executable, "-m", "crater_agent", "--config", str(file), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (answer.returncode, '"cpu_milli": 2000' in answer.stdout) == (0, True)
    assert not (tmp_path / "agent-n1").exists()
