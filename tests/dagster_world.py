"""Launches runs of the tests' code location through the real run launcher, and reads what became of them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from agent_harness import AgentProcess, start_agent
from dagster import DagsterEvent, DagsterEventType, DagsterInstance, DagsterRun
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget, PythonFileTarget
from harness import PATIENCE_S, wait_until

from crater_core.client import CraterClient
from crater_core.wire.tasks import TaskView
from crater_dagster import CraterRunLauncher

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
FIRST_PORT = 31_000 + 200 * WORKER
"""Tests that run at the same time have nodes of the same names; their ports must differ."""
FILE = Path(__file__).parent / "dagster" / "pipelines.py"


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"crater_test_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class World:
    """An instance with one code location, `file`."""

    def __init__(
        self, place: Path, instance: DagsterInstance, workspace: WorkspaceProcessContext, client: CraterClient, file: Path
    ) -> None:
        self.place, self.instance, self.workspace, self.client, self.file = place, instance, workspace, client, file
        self.code = load(file)
        self.defs = self.code.defs

    @staticmethod
    @contextlib.contextmanager
    def open(home: Path, client: CraterClient, file: Path = FILE, port: int | None = None) -> Iterator[World]:
        """With `port`, the code location is the one that a server has there."""
        target = (
            PythonFileTarget(str(file), "defs", str(file.parent), "tests")
            if port is None
            else GrpcServerTarget("127.0.0.1", port, None, "tests")
        )
        with DagsterInstance.from_config(str(home)) as instance, WorkspaceProcessContext(instance, target) as workspace:
            yield World(home.parent, instance, workspace, client, file)
            servers = workspace._grpc_server_registry
        servers.wait_for_processes()

    @property
    def launcher(self) -> CraterRunLauncher:
        launcher = self.instance.run_launcher
        assert isinstance(launcher, CraterRunLauncher)
        return launcher

    def create(self, job: str, run_config: dict[str, Any] | None = None, tags: dict[str, str] | None = None) -> DagsterRun:
        location = self.workspace.create_request_context().code_locations[0]
        remote = next(iter(location.get_repositories().values())).get_full_job(job)
        definition = self.defs.resolve_job_def(job)
        return self.instance.create_run_for_job(
            definition,
            run_config=run_config,
            tags={**definition.run_tags, **(tags or {})},
            remote_job_origin=remote.get_remote_origin(),
            job_code_origin=remote.get_python_origin(),
        )

    def launch(self, job: str, run_config: dict[str, Any] | None = None, tags: dict[str, str] | None = None) -> str:
        run = self.create(job, run_config, tags)
        self.instance.launch_run(run.run_id, self.workspace.create_request_context())
        return run.run_id

    def run(self, run_id: str) -> DagsterRun:
        found = self.instance.get_run_by_id(run_id)
        assert found is not None
        return found

    def finish(self, run_id: str, timeout_s: float = PATIENCE_S) -> str:
        """The final status; the whole story when there is none in time."""
        until = time.monotonic() + timeout_s
        while not self.run(run_id).is_finished:
            assert time.monotonic() < until, f"{self.run(run_id).status}\n{self.story(run_id)}"
            time.sleep(0.05)
        return self.run(run_id).status.value

    def events(self, run_id: str, kind: DagsterEventType | None = None) -> list[DagsterEvent]:
        entries = self.instance.all_logs(run_id, of_type=kind)
        return [entry.dagster_event for entry in entries if entry.dagster_event is not None]

    def messages(self, run_id: str) -> list[str]:
        return [event.message or "" for event in self.events(run_id, DagsterEventType.ENGINE_EVENT)]

    def failure(self, run_id: str) -> str:
        """Why the first step failed, causes included."""
        event = self.events(run_id, DagsterEventType.STEP_FAILURE)[0]
        error = event.step_failure_data.error
        texts = []
        while error is not None:
            texts.append(error.message)
            error = error.cause
        return "\n".join(texts)

    def tasks(self, run_id: str) -> list[TaskView]:
        return list(self.client.tasks(group=f"dagster-run:{run_id}"))

    def task_of(self, run_id: str, step_key: str | None) -> TaskView:
        """Of a step, or of the run worker."""
        wanted = {"crater/role": "step", "dagster/step_key": step_key} if step_key else {"crater/role": "run"}
        return next(self.client.tasks(group=f"dagster-run:{run_id}", labels=wanted))

    def task_once(self, run_id: str, step_key: str) -> TaskView:
        """Of a step, once it has been submitted."""
        wanted = {"crater/role": "step", "dagster/step_key": step_key}
        found = lambda: next(self.client.tasks(group=f"dagster-run:{run_id}", labels=wanted), None)  # noqa: E731
        return wait_until(found, PATIENCE_S, f"a task of {step_key}")

    def worker_pid(self, run_id: str, step_key: str | None) -> int:
        """The process of a step, or of the run worker, as its node wrote it down."""
        allocation = self.task_of(run_id, step_key).allocation
        return json.loads(next(self.place.rglob(f"{allocation}/started.json")).read_text())["pid"]

    def task_of_role(self, run_id: str, role: str) -> TaskView:
        return next(self.client.tasks(group=f"dagster-run:{run_id}", labels={"crater/role": role}))

    def resume(self, run_id: str, attempt: int) -> None:
        """As Dagster's monitoring does when a run worker has gone."""
        self.instance.resume_run(run_id, self.workspace.create_request_context(), attempt)

    def log_texts(self, run_id: str) -> list[str]:
        return [entry.user_message for entry in self.instance.all_logs(run_id)]

    def captured(self, run_id: str) -> tuple[bytes, bytes]:
        """What the run's first step wrote to stdout and stderr, as Dagster shows it."""
        event = self.events(run_id, DagsterEventType.LOGS_CAPTURED)[0]
        manager = self.instance.compute_log_manager
        key = manager.build_log_key_for_run(run_id, event.logs_captured_data.file_key)
        data = manager.get_log_data(key)
        return data.stdout or b"", data.stderr or b""

    def no_task_lives(self, run_id: str, timeout_s: float = 10.0) -> None:
        wait_until(lambda: all(task.ended for task in self.tasks(run_id)), timeout_s, f"tasks of {run_id} ended")

    def story(self, run_id: str) -> str:
        lines = [
            f"{entry.timestamp:.3f} {entry.step_key or '-'} {entry.dagster_event_type or entry.level}: {entry.message}"
            for entry in self.instance.all_logs(run_id)
        ]
        for task in self.tasks(run_id):
            lines.append(f"task {task.name} {task.status} {task.reason.message if task.reason else ''}")
            with contextlib.suppress(Exception):
                lines.append(self.client.logs(task.id, "stderr").data.decode()[-3000:])
        return "\n".join(lines)

    def told(self) -> str:
        """For who looks at a test that failed: the stories of the last two runs, and every task that has not ended."""
        lines = []
        for run in self.instance.get_runs(limit=2):
            lines += [f"run {run.run_id} of {run.job_name}: {run.status.value}", self.story(run.run_id)]
        for task in self.client.tasks():
            if not task.ended:
                lines.append(
                    f"live: {task.group} {task.name} {task.status} on {task.node}: {task.reason and task.reason.message}"
                )
        return "\n".join(lines)


def _profile(place: Path, url: str, home: str) -> dict[str, str]:
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}
    return {"DAGSTER_HOME": str(place / home), "CRATER_ENDPOINT": url, "DO_NOT_TRACK": "1", **path}


def a_node(place: Path, url: str, name: str, side: str, gpu: bool) -> AgentProcess:
    overrides: dict[str, Any] = {
        "labels": {"side": side},
        "env_profiles": {home: _profile(place, url, home) for home in ("dagster", "logging", "postgres", "shipping", "rules")},
        "control": {"slots": 4, "memory": "4GB"},
        "ports": {"first": FIRST_PORT + (0 if side == "left" else 100), "count": 100},
        "sample_interval": "5s",
    }
    if gpu:
        overrides["simulated_gpus"] = [{"count": 1, "memory": "8GiB"}]
        overrides["gpu_sharing"] = {"enabled": True, "compute_mode": "time_slice"}
        pools = [
            {"name": "cpu-pool", "type": "cpu", "cores": 2},
            {"name": "memory-pool", "type": "memory", "size_gb": 4},
            {"name": "gpu-pool", "type": "gpu", "devices": [0]},
        ]
        overrides["resource_pools"] = pools
    return start_agent(place, url, name, **overrides)


def a_home(place: Path, url: str, name: str, options: dict[str, Any] | None = None, **further: Any) -> Path:
    """A DAGSTER_HOME with its dagster.yaml: `options` are the run launcher's, `further` other keys."""
    home = place / name
    home.mkdir()
    config = {"endpoint": url, "env_profile": name, "grace": "3s", "unreachable_grace": "2s", **(options or {})}
    launcher = {"module": "crater_dagster", "class": "CraterRunLauncher", "config": config}
    (home / "dagster.yaml").write_text(
        yaml.safe_dump({"run_launcher": launcher, "telemetry": {"enabled": False}, "nux": {"enabled": False}, **further})
    )
    return home
