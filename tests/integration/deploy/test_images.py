"""The images of deploy/ are built, and a scheduler and an agent in containers run a task."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from agent_harness import poll_until
from base_image import CHANGES, as_layer, make_tree
from docker_world import DockerWorld

from crater_agent.directories import group_name
from crater_core.service.auth import hash_of

ROOT = Path(__file__).parents[3]
CONTEXT = ("crater_core", "crater_dagster", "agent", "pyproject.toml", "README.md", "LICENSE", "constraints.txt", "deploy")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())


@pytest.fixture(scope="module")
def world() -> Iterator[DockerWorld]:
    engine = DockerWorld().start()
    try:
        with tempfile.TemporaryDirectory() as tree:
            make_tree(Path(tree))
            engine.add(as_layer(Path(tree)), "crater-base:1", CHANGES)
        for name in ("scheduler", "agent"):
            _build(engine, name)
        yield engine
    finally:
        engine.remove()


def _build(engine: DockerWorld, name: str) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for part in CONTEXT:
            tar.add(ROOT / part, part, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    content.seek(0)
    said: list[str] = []
    with contextlib.closing(engine.client()) as client:
        client.timeout = 300
        for line in client.build(
            fileobj=content,
            custom_context=True,
            dockerfile=f"deploy/{name}.Containerfile",
            tag=f"crater-{name}:test",
            buildargs={"BASE": "crater-base:1"},
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
        ):
            said.append(line.get("stream", "") or line.get("error", ""))
            assert "error" not in line, "".join(said)[-3_000:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _privileged() -> dict[str, Any]:
    """Where this machine is itself without some of root's rights, no engine on it can give them all: then what the agent uses."""
    shown = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapBnd"))
    if int(shown.split()[1], 16) == 2 ** (int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1) - 1:
        return {"privileged": True}
    return {
        "cap_add": ["SYS_ADMIN", "SYS_PTRACE", "SYS_NICE", "DAC_READ_SEARCH"],
        "security_opt": ["seccomp=unconfined", "apparmor=unconfined"],
        "device_cgroup_rules": ["a *:* rwm"],
        "binds": ["/sys/fs/cgroup:/sys/fs/cgroup:rw"],
    }


def _start(engine: DockerWorld, name: str, file: Path, environ: dict[str, str], binds: list[str]) -> str:
    """As the Compose file says, but with the host's network for both: the tests' engine has no other."""
    service = COMPOSE["services"][name]
    rights = _privileged() if service.get("privileged") else {name: service.get(name) for name in ("cap_drop", "security_opt")}
    with contextlib.closing(engine.client()) as client:
        host = client.create_host_config(
            network_mode="host",
            binds=[f"{file}:/etc/crater/{name}.yaml:ro", *binds, *rights.pop("binds", [])],
            pid_mode=service.get("pid"),
            **rights,
            read_only=service.get("read_only", False),
            tmpfs=dict.fromkeys(service.get("tmpfs", []), ""),
        )
        host |= {"MaskedPaths": [], "ReadonlyPaths": []} if "cap_add" in rights else {}
        if "cgroup" in service:
            host["CgroupnsMode"] = service["cgroup"]
        made = client.create_container(f"crater-{name}:test", host_config=host, environment=environ)
        client.start(made["Id"])
        return str(made["Id"])


def _log(engine: DockerWorld, container: str) -> str:
    with contextlib.closing(engine.client()) as client:
        return str(client.logs(container).decode(errors="replace"))[-3_000:]


@pytest.fixture
def data() -> Iterator[Path]:
    """A directory that shows mounts made in a container to the host, as all of a machine under systemd does."""
    path = Path(tempfile.mkdtemp(prefix="crater-test-"))
    path.chmod(0o755)
    subprocess.run(["mount", "--bind", path, path], check=True)
    subprocess.run(["mount", "--make-rshared", path], check=True)
    yield path
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if line.split()[1].startswith(str(path)):
            subprocess.run(["umount", "-l", line.split()[1]], check=False)
    shutil.rmtree(path, ignore_errors=True)


def test_a_scheduler_and_an_agent_in_containers_run_a_task(world: DockerWorld, tmp_path: Path, data: Path):
    port, secret = _free_port(), "crater_of_the_tests"
    settings: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/scheduler.yaml").read_text())
    settings |= {"listen": f"127.0.0.1:{port}", "metrics": {"enabled": False}}
    settings["tokens"] = [{"name": role, "role": role, "sha256": hash_of(f"{secret}_{role}")} for role in ("admin", "agent")]
    scheduler_file, agent_file = tmp_path / "scheduler.yaml", tmp_path / "agent.yaml"
    scheduler_file.write_text(yaml.safe_dump(settings))
    of_agent: dict[str, Any] = yaml.safe_load((ROOT / "deploy/compose/agent.yaml").read_text())
    of_agent |= {"scheduler_endpoint": f"http://127.0.0.1:{port}", "listen": "127.0.0.1:0", "data_dir": str(data / "agent")}
    of_agent |= {"docker": {"enabled": False}}
    agent_file.write_text(yaml.safe_dump(of_agent))
    scheduler = _start(world, "scheduler", scheduler_file, {}, [])
    agent = _start(world, "agent", agent_file, {"CRATER_TOKEN": f"{secret}_agent"}, [f"{data}:{data}:rshared"])
    http = httpx.Client(
        base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {secret}_admin"}, trust_env=False, timeout=10
    )

    def get(path: str) -> Any:
        with contextlib.suppress(httpx.TransportError):
            answer = http.get(path)
            return answer.json() if answer.status_code == 200 else None

    try:
        poll_until(lambda: get("/health"), 30, f"the scheduler; {_log(world, scheduler)}")
        nodes = poll_until(lambda: (get("/v1/nodes") or {}).get("nodes"), 30, f"the agent; {_log(world, agent)}")
        assert [(node["name"], node["enforcement"]) for node in nodes] == [("node-1", "enforced")]
        body = {
            "name": "who",
            "command": ["sh", "-c", "id -un; python -c 'import crater_core; print(crater_core.__name__)'"],
            "resources": {"cpu": 0.5, "memory": "256MiB"},
        }
        task = http.post("/v1/tasks", json=body).json()["id"]
        ended = poll_until(
            lambda: (found := get(f"/v1/tasks/{task}")) and found["status"] in ("succeeded", "failed") and found, 30, "the task"
        )
        assert ended["status"] == "succeeded", json.dumps(ended)
        assert http.get(f"/v1/tasks/{task}/logs").text == "crater-tasks\ncrater_core\n"
    finally:
        http.close()
        world.clear({})
        mark = group_name("node-1", data / "agent")
        for path, _, _ in os.walk("/sys/fs/cgroup", topdown=False):
            if f"/{mark}" in path:
                with contextlib.suppress(OSError):
                    Path(path).rmdir()
