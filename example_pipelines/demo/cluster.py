"""The demo's cluster: its configuration files, the scheduler, two agents and Dagster, each started and waited for."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from example_pipelines.demo.machine import Machine, free_blocks, free_ports, share_of_cores, share_of_memory_gb
from example_pipelines.demo.processes import Processes, program

GPU_NODE, CPU_NODE = "gpu-node-01", "cpu-node-01"
START_TIMEOUT_S = 60.0
DAGSTER_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Every port the demo listens on, all on 127.0.0.1."""

    scheduler: int
    scheduler_metrics: int
    gpu_agent: int
    cpu_agent: int
    dagster: int


def any_ports() -> Ports:
    return Ports(*free_ports(5))


@dataclass(frozen=True, slots=True)
class Demo:
    """A home directory, and what is written into its files."""

    home: Path
    ports: Ports
    machine: Machine
    token: str
    autoscale: bool = False

    @property
    def scheduler_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.scheduler}"

    @property
    def dagster_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.dagster}"

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def client_environment(self) -> dict[str, str]:
        """What a program needs to reach this cluster and the loop's files."""
        return {
            "CRATER_ENDPOINT": self.scheduler_url,
            "CRATER_TOKEN_FILE": str(self.home / "token"),
            "CRATER_EXAMPLE_DATA": str(self.data),
            "CRATER_EXAMPLE_AUTOSCALE": "1" if self.autoscale else "0",
            **{name: os.environ[name] for name in ("CRATER_EXAMPLE_EPOCHS",) if name in os.environ},
            "DAGSTER_HOME": str(self.home / "dagster"),
            "DO_NOT_TRACK": "1",
        }

    @property
    def environment(self) -> dict[str, str]:
        """For the processes that the demo starts itself."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
        return {**kept, **self.client_environment, "CRATER_DEMO_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}


def new_token() -> str:
    return "crater_" + secrets.token_urlsafe(32)


def write_files(demo: Demo) -> None:
    """Everything below the home directory that the processes read. Only this user may read it: it holds a token."""
    demo.home.mkdir(mode=0o700, parents=True, exist_ok=True)
    demo.home.chmod(0o700)
    for directory in ("data", "dagster", "logs"):
        (demo.home / directory).mkdir(exist_ok=True)
    _write(demo.home / "token", demo.token + "\n")
    _write_yaml(demo.home / "scheduler.yaml", _scheduler(demo))
    blocks = free_blocks(2)
    _write_yaml(demo.home / "gpu-node-01.yaml", _agent(demo, GPU_NODE, demo.ports.gpu_agent, blocks[0], gpu=True))
    _write_yaml(demo.home / "cpu-node-01.yaml", _agent(demo, CPU_NODE, demo.ports.cpu_agent, blocks[1], gpu=False))
    _write_yaml(demo.home / "dagster" / "dagster.yaml", _dagster())
    _write_yaml(demo.home / "workspace.yaml", {"load_from": [{"python_module": "example_pipelines.definitions"}]})
    exports = (f"export {name}='{value}'\n" for name, value in demo.client_environment.items())
    _write(demo.home / "env", f'export PATH="{Path(sys.executable).parent}:$PATH"\n' + "".join(exports))


def _scheduler(demo: Demo) -> dict[str, Any]:
    return {
        "listen": f"127.0.0.1:{demo.ports.scheduler}",
        "data_dir": str(demo.home / "scheduler"),
        "scheduling_policy": "best_fit",
        "metrics": {"enabled": True, "port": demo.ports.scheduler_metrics},
        "tokens": [{"name": "demo", "role": "admin", "sha256": hashlib.sha256(demo.token.encode()).hexdigest()}],
        "quota_policies": {
            "training-quota": {"limits": {"gpu": 4, "cpu": 32, "memory": "128GB", "disk": "1TB"}},
            "inference-quota": {"limits": {"gpu": 2, "cpu": 16, "memory": "64GB", "disk": "200GB"}},
            "dev-quota": {"limits": {"gpu": 1, "cpu": 8, "memory": "32GB", "disk": "100GB"}},
        },
        "log": {"file": str(demo.home / "logs" / "scheduler.log")},
    }


def _agent(demo: Demo, name: str, port: int, block: tuple[int, int], *, gpu: bool) -> dict[str, Any]:
    pools: list[dict[str, Any]] = [
        {"name": "cpu-pool", "type": "cpu", "cores": share_of_cores(demo.machine.cores)},
        {"name": "memory-pool", "type": "memory", "size_gb": share_of_memory_gb(demo.machine.memory_gb)},
    ]
    config: dict[str, Any] = {
        "scheduler_endpoint": demo.scheduler_url,
        "token_file": str(demo.home / "token"),
        "node_name": name,
        "labels": {"zone": "demo", "kind": "gpu" if gpu else "cpu"},
        "resource_pools": pools,
        "listen": f"127.0.0.1:{port}",
        "data_dir": str(demo.home / name),
        "control": {"slots": 4, "memory": "3GB"},
        "ports": {"first": block[0], "count": block[1]},
        "sample_interval": "5s",
        "mount_roots": [str(demo.data)],
        # What Dagster's processes on this node need, so that it stands in no message.
        "env_profiles": {"dagster": demo.client_environment},
    }
    if gpu:
        pools.insert(0, {"name": "gpu-pool", "type": "gpu", "devices": [0]})
        config["gpu_sharing"] = {"enabled": True, "memory_overcommit_ratio": 1.2, "compute_mode": "time_slice"}
        if not demo.machine.real_gpus:
            config["simulated_gpus"] = [{"model": "Simulated 24 GB GPU", "gpu_type": "simulated", "memory": "24GiB", "count": 1}]
    return config


def _dagster() -> dict[str, Any]:
    return {
        "run_launcher": {
            "module": "crater_dagster",
            "class": "CraterRunLauncher",
            "config": {"env_profile": "dagster"},
        },
        "run_coordinator": {
            "module": "dagster",
            "class": "QueuedRunCoordinator",
            "config": {"max_concurrent_runs": 4, "dequeue_interval_seconds": 1},
        },
        "compute_logs": {"module": "crater_dagster", "class": "CraterComputeLogManager"},
        "telemetry": {"enabled": False},
        "nux": {"enabled": False},
    }


def start_cluster(demo: Demo, processes: Processes) -> None:
    """The scheduler, then two agents; returns when both nodes are ready to be given work."""
    processes.start("crater-scheduler", [program("crater-scheduler"), "--config", str(demo.home / "scheduler.yaml")])
    processes.wait_until("the scheduler", lambda: answers(f"{demo.scheduler_url}/health"), START_TIMEOUT_S)
    for name in (GPU_NODE, CPU_NODE):
        command = [program("crater-agent"), "--config", str(demo.home / f"{name}.yaml"), "--stop-workloads-on-exit"]
        processes.start(f"crater-agent-{name}", command, grace_s=20.0, wave=1)

    def both_ready() -> bool:
        health = answers(f"{demo.scheduler_url}/health")
        return bool(health) and json.loads(health).get("nodes_ready") == 2

    processes.wait_until("a cluster of two nodes", both_ready, START_TIMEOUT_S)


def prepare_dagster(demo: Demo) -> None:
    """Make Dagster's databases once: its web server and daemon, started together, would both begin to and stumble."""
    made = demo.home / "dagster" / ".made"
    if made.exists():
        return
    from dagster import DagsterInstance

    with DagsterInstance.from_config(str(demo.home / "dagster")) as instance:
        instance.get_runs_count()
        instance.all_asset_keys()
        instance.all_instigator_state()
    made.touch()


def start_dagster(demo: Demo, processes: Processes) -> None:
    """Dagster's web server and daemon, both on the workspace that loads the example."""
    prepare_dagster(demo)
    workspace = ["-w", str(demo.home / "workspace.yaml")]
    web = [program("dagster-webserver"), "-h", "127.0.0.1", "-p", str(demo.ports.dagster), *workspace]
    processes.start("dagster-webserver", web, wave=2)
    processes.start("dagster-daemon", [program("dagster-daemon"), "run", *workspace], wave=2)


def wait_for_dagster(demo: Demo, processes: Processes) -> None:
    processes.wait_until("Dagster's web server", lambda: answers(f"{demo.dagster_url}/server_info"), DAGSTER_TIMEOUT_S)


def answers(url: str) -> str:
    """The body that comes back with 200, else nothing."""
    try:
        response = httpx.get(url, timeout=2.0)
    except httpx.HTTPError:
        return ""
    return response.text if response.status_code == 200 else ""


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    _write(path, yaml.safe_dump(content, sort_keys=False, width=130))


def _write(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
