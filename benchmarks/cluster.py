"""One scheduler and one agent on this machine, for as long as a measurement takes. No tokens: nothing but loopback."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from example_pipelines.demo.cluster import answers
from example_pipelines.demo.machine import free_ports
from example_pipelines.demo.processes import Processes, program

NODE = "bench-01"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Cluster:
    url: str
    home: Path
    processes: Processes


@contextlib.contextmanager
def a_cluster(
    home: Path, agent_keys: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """Its node offers all cores of the machine; tasks may ask for parts of a core, so that many run at once. `agent_keys`: keys
    of agent.yaml to set or, by None, to take away; `environ`: variables for all of it."""
    scheduler, metrics, agent = free_ports(3)
    url = f"http://127.0.0.1:{scheduler}"
    cores = len(os.sched_getaffinity(0))
    _write(
        home / "scheduler.yaml",
        {
            "listen": f"127.0.0.1:{scheduler}",
            "data_dir": str(home / "scheduler"),
            "metrics": {"enabled": True, "port": metrics},
            "log": {"level": "warning"},
        },
    )
    agent_yaml: dict[str, object] = {
        "scheduler_endpoint": url,
        "node_name": NODE,
        "listen": f"127.0.0.1:{agent}",
        "data_dir": str(home / "agent"),
        "resource_pools": [
            {"name": "gpu-pool", "type": "gpu", "devices": "all"},
            {"name": "cpu-pool", "type": "cpu", "cores": cores},
            {"name": "memory-pool", "type": "memory", "size_gb": 4},
        ],
        "simulated_gpus": [{"model": "Simulated GPU", "count": 1}],
        "gpu_sharing": {"enabled": True, "compute_mode": "time_slice"},
        "env_profiles": {"dagster": {"DAGSTER_HOME": str(home / "dagster"), "PYTHONPATH": str(ROOT), "CRATER_ENDPOINT": url}},
        "log": {"level": "warning"},
    }
    agent_yaml |= agent_keys or {}
    _write(home / "agent.yaml", {key: value for key, value in agent_yaml.items() if value is not None})
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    processes = Processes(home, {**environment, **(environ or {}), "CRATER_DEMO_HOME": str(home)})
    try:
        processes.start("scheduler", [program("crater-scheduler"), "--config", str(home / "scheduler.yaml")])
        processes.wait_until("the scheduler", lambda: bool(answers(f"{url}/health")), 30)
        command = [program("crater-agent"), "--config", str(home / "agent.yaml"), "--stop-workloads-on-exit"]
        processes.start("agent", command)
        processes.wait_until("the node", lambda: json.loads(answers(f"{url}/health") or "{}").get("nodes_ready") == 1, 30)
        yield Cluster(url, home, processes)
    finally:
        processes.stop_all()


def _write(path: Path, content: object) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))
