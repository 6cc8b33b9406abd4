"""Starts real agents for tests, and a small real HTTP scheduler for the tests that need no more than the agent's protocol."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
import yaml
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from crater_core.wire.agents import Lease, Leases, NodeDeclaration, Registered, ReportBatch, ReportBody

T = TypeVar("T")


def poll_until(check: Callable[[], T], timeout_s: float = 15.0, what: str = "") -> T:
    """The first true value of `check`; an AssertionError when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if value := check():
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what or check}"
        time.sleep(0.01)


@dataclass
class AgentProcess:
    process: subprocess.Popen[bytes]
    data_dir: Path
    config_file: Path
    log_file: Path
    name: str
    command: list[str]
    environ: dict[str, str] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def group_name(self) -> str:
        """The level of cgroups that is this agent's own."""
        return f"crater-{self.name}-{hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:8]}"

    def kill(self) -> None:
        """SIGKILL: as a crash. Its workloads go on."""
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """SIGTERM: a clean stop. Its workloads go on. The exit code."""
        self.process.terminate()
        return self.process.wait(30)

    def restart(self) -> AgentProcess:
        """Start it again with the same file and data."""
        with self.log_file.open("ab") as log:
            environ = {**os.environ, **(self.environ or {})}
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environ)
        return self

    def stop(self) -> None:
        """End the agent and everything it ever started; nothing is left, whatever state it was in."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._end_workloads()

    def groups(self) -> list[Path]:
        """Its cgroups, of every controller. (A walk minds no group that another test takes away meanwhile; a glob does.)"""
        return [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if path.endswith(f"/{self.group_name}")]

    @staticmethod
    def groups_in(group: Path) -> list[Path]:
        """Those of its workloads."""
        return [Path(path) for path, _, _ in os.walk(group, topdown=False) if path != str(group)]

    def _end_workloads(self) -> None:
        """By the mark that each workload of this data directory carries, and the spawner by its command line."""
        mark, own = os.fsencode(self.data_dir), os.getpid()
        for _ in range(200):
            found = [pid for pid in _pids() if pid != own and mark in _words(pid)]
            if not found:
                break
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for group in self.groups():
            for inner in (*self.groups_in(group), group):
                with contextlib.suppress(OSError):
                    inner.rmdir()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{self.data_dir}/"):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        shutil.rmtree(self.data_dir, ignore_errors=True)
        # What MPS daemons leave that are killed.
        base = "/run/crater-mps" if os.geteuid() == 0 else f"{tempfile.gettempdir()}/crater-mps-{os.geteuid()}"
        shutil.rmtree(Path(base, self.group_name.rpartition("-")[2]), ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(base).rmdir()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _words(pid: int) -> bytes:
    words = b""
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            words += Path(f"/proc/{pid}/{name}").read_bytes() + b"\0"
    return words


def as_ordinary_user(directory: Path) -> dict[str, Any]:
    """Arguments of `start_agent` for an agent that may not make cgroups, with `directory` made its own.

    Root's own interpreter may lie where no other user can run it; then the system's takes its place, with our packages.
    """
    if os.geteuid() != 0:
        return {}
    directory.mkdir(exist_ok=True)
    os.chown(directory, 65534, 65534)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    reachable = all(parent.stat().st_mode & 0o001 for parent in Path(sys.executable).resolve().parents)
    return {
        "prefix": ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
        "python": sys.executable if reachable else f"/usr/bin/{version}",
        "environ": {"PYTHONPATH": ":".join(path for path in sys.path if path and "zip" not in path)},
    }


def agent_config(tmp_path: Path, scheduler_url: str, name: str = "n1", **overrides: Any) -> dict[str, Any]:
    """A small share of this machine. An override of None takes the key away."""
    config: dict[str, Any] = {
        "scheduler_endpoint": scheduler_url,
        "node_name": name,
        "listen": "127.0.0.1:0",
        # Whatever engine this machine may have is not the tests'.
        "docker": {"enabled": False},
        "data_dir": str(tmp_path / f"agent-{name}"),
        "resource_pools": [
            {"name": "cpu-pool", "type": "cpu", "cores": 2},
            {"name": "memory-pool", "type": "memory", "size_gb": 4},
            {"name": "disk-pool", "type": "disk", "path": str(tmp_path / f"agent-{name}"), "size_gb": 10},
        ],
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not None}


def start_agent(
    tmp_path: Path,
    scheduler_url: str,
    name: str = "n1",
    *,
    arguments: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    python: str = sys.executable,
    environ: dict[str, str] | None = None,
    **overrides: Any,
) -> AgentProcess:
    """A real agent as its own process; further keys of agent.yaml as keyword arguments. The caller calls `stop`."""
    config = agent_config(tmp_path, scheduler_url, name, **overrides)
    config_file, log_file = tmp_path / f"agent-{name}.yaml", tmp_path / f"agent-{name}.log"
    config_file.write_text(yaml.safe_dump(config))
    command = [*prefix, python, "-m", "crater_agent", "--config", str(config_file), *arguments]
    with log_file.open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **(environ or {})})
    return AgentProcess(process, Path(config["data_dir"]), config_file, log_file, name, command, environ)


@dataclass
class SchedulerStandIn:
    """Serves the agent's endpoints from a list of leases that the test edits, and keeps what it hears."""

    port: int = 0
    interval_ms: int = 500
    timeout_ms: int = 30_000
    token: str | None = None
    leader: str | None = None
    """Answer every call with 421 and this leader ("" is: no leader now)."""
    term: int = 1
    declarations: list[NodeDeclaration] = field(default_factory=list)
    reports: list[ReportBody] = field(default_factory=list)
    heartbeats: list[dict[str, Any]] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    report_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._revision = 1
        self._changed = threading.Condition()
        self._known = False
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    # ---- for the test

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def declaration(self) -> NodeDeclaration:
        return poll_until(lambda: self.declarations, what="a registration")[-1]

    def give(self, allocation: str, command: list[str], **fields: Any) -> Lease:
        defaults: dict[str, Any] = {
            "task": f"task-{allocation}",
            "token": 7,
            "name": f"name-{allocation}",
            "project": "p",
            "user": "u",
            "attempt": 1,
            "member": 0,
            "members": 1,
            "cpu_milli": 500,
            "memory_bytes": 256 * 1024**2,
            "disk_bytes": 0,
            "grace_ms": 2_000,
        }
        lease = Lease(allocation=allocation, command=command, **{**defaults, **fields})
        self._put(lease)
        return lease

    def change(self, allocation: str, **fields: Any) -> None:
        self._put(self._leases[allocation].model_copy(update=fields))

    def take(self, allocation: str) -> None:
        with self._changed:
            self._leases.pop(allocation, None)
            self._revision += 1
            self._changed.notify_all()

    def _put(self, lease: Lease) -> None:
        with self._changed:
            self._leases[lease.allocation] = lease
            self._revision += 1
            self._changed.notify_all()

    def reports_of(self, allocation: str) -> list[ReportBody]:
        return [report for report in self.reports if report.allocation == allocation]

    def final(self, allocation: str, timeout_s: float = 15.0) -> ReportBody:
        """The report of its end, once it is there."""

        def ended() -> list[ReportBody]:
            return [report for report in self.reports_of(allocation) if report.status.ended]

        return poll_until(ended, timeout_s, f"an end of {allocation}; heard: {self.reports_of(allocation)}")[0]

    def running(self, allocation: str, timeout_s: float = 15.0) -> ReportBody:
        def runs() -> list[ReportBody]:
            return [report for report in self.reports_of(allocation) if report.status.value == "running"]

        return poll_until(runs, timeout_s, f"{allocation} running; heard: {self.reports_of(allocation)}")[-1]

    def read_log(self, allocation: str, stream: str = "stdout", offset: int = 0, wait: float = 0) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.declaration.agent_secret}"}
        query = {"stream": stream, "offset": offset, "wait": wait}
        with httpx.Client(trust_env=False) as client:
            return client.get(f"{self.declaration.agent_url}/logs/{allocation}", params=query, headers=headers, timeout=70)

    def read_log_text(self, allocation: str, stream: str = "stdout") -> str:
        """Empty where there is no log so far."""
        answer = self.read_log(allocation, stream)
        return "" if answer.status_code == httpx.codes.NOT_FOUND else answer.raise_for_status().text

    def forget(self) -> None:
        """As a scheduler that was started anew: it knows no agent."""
        self._known = False

    # ---- life

    def start(self) -> SchedulerStandIn:
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=self.port, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        poll_until(lambda: self._server is not None and self._server.started, what="the stand-in listening")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            with self._changed:
                self._changed.notify_all()
            self._thread.join(10)
            self._server = None

    # ---- the protocol

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def guard(request: Request, call_next: Any) -> Response:
            if self.leader is not None:
                body = {"type": "urn:crater:not_leader", "detail": "not the leader", "leader": self.leader}
                return JSONResponse(body, 421)
            if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
                return JSONResponse({"type": "urn:crater:unauthenticated", "detail": "no such token"}, 401)
            if not self._known and not request.url.path.endswith("/register"):
                return JSONResponse({"type": "urn:crater:not_found", "detail": "this agent is not registered"}, 404)
            return await call_next(request)

        @app.post("/v1/agents/{node}/register")
        def register(node: str, body: NodeDeclaration) -> Registered:
            self._known = True
            self.declarations.append(body)
            return Registered(
                term=self.term, heartbeat_interval_ms=self.interval_ms, heartbeat_timeout_ms=self.timeout_ms, server_time_ms=0
            )

        @app.get("/v1/agents/{node}/leases")
        def leases(node: str, after: int | None = None, wait: float = 0) -> Leases:
            with self._changed:
                if after is not None:
                    over = self._server
                    self._changed.wait_for(
                        lambda: self._revision > after or self._server is not over or self.closing, timeout=min(wait, 2)
                    )
                return Leases(revision=self._revision, term=self.term, leases=list(self._leases.values()))

        @app.post("/v1/agents/{node}/reports")
        def reports(node: str, body: ReportBatch) -> dict[str, list[str]]:
            fresh = [report for report in body.reports if report.allocation not in self.stale]
            self.reports += fresh
            self.report_times += [time.monotonic()] * len(fresh)
            for report in fresh:
                lease = self._leases.get(report.allocation)
                if lease is not None and report.status.ended:
                    self.take(report.allocation)
                elif lease is not None and not lease.started:
                    self._leases[report.allocation] = lease.model_copy(update={"started": True})
            return {"stale": [report.allocation for report in body.reports if report.allocation in self.stale]}

        @app.post("/v1/agents/{node}/heartbeat")
        async def heartbeat(node: str, request: Request) -> dict[str, int]:
            self.heartbeats.append(json.loads(await request.body()))
            return {"term": self.term, "server_time_ms": 0}

        return app

    @property
    def closing(self) -> bool:
        return self._server is None or self._server.should_exit


@contextlib.contextmanager
def stand_in(**fields: Any) -> Iterator[SchedulerStandIn]:
    scheduler = SchedulerStandIn(**fields).start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
