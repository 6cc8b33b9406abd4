"""Dagster's own web server and daemon as processes, asked by GraphQL as its pages ask."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from dagster_world import World
from harness import PATIENCE_S, free_port, wait_until

_LAUNCHED = "{ __typename ... on LaunchRunSuccess {run {runId}} ... on PythonError {message} }"
LAUNCH = f"mutation ($params: ExecutionParams!) {{ launchRun(executionParams: $params) {_LAUNCHED} }}"
EXECUTE_AGAIN = f"""mutation ($params: ReexecutionParams!) {{
  launchRunReexecution(reexecutionParams: $params) {_LAUNCHED} }}"""
TERMINATE = "mutation ($run: String!) { terminateRun(runId: $run) { __typename ... on TerminateRunFailure {message} } }"
END_AT_ONCE = """mutation ($run: String!) { terminateRun(runId: $run, terminatePolicy: MARK_AS_CANCELED_IMMEDIATELY) {
  __typename } }"""
REPOSITORIES = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
STATUS = "query ($run: ID!) { runOrError(runId: $run) { ... on Run { status } } }"
LOGS = "query ($key: [String!]!) { capturedLogs(logKey: $key) { stdout stderr } }"
FILE_KEYS = """query ($run: ID!) { runOrError(runId: $run) { ... on Run { eventConnection { events {
  ... on LogsCapturedEvent { fileKey stepKeys } } } } } }"""


class Dagster:
    """The real web server and the real daemon on the instance of this name, with the world's code location or those of
    `workspace`, a workspace.yaml."""

    def __init__(self, world: World, name: str, workspace: Path | None = None) -> None:
        self.world = world
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        home = world.place / name
        environment = {**os.environ, "DAGSTER_HOME": str(home), "DO_NOT_TRACK": "1"}
        target = ["-w", str(workspace)] if workspace else ["-f", str(world.file), "-d", str(world.file.parent), "-a", "defs"]
        self._log = (home / "web.log").open("wb")
        self._processes = [
            self._start(["-m", "dagster_webserver", "-h", "127.0.0.1", "-p", str(port), *target], environment),
            self._start(["-m", "dagster._daemon", "run", *target], environment),
        ]
        self._client = httpx.Client(trust_env=False, timeout=30)

    def _start(self, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def ready(self) -> bool:
        assert all(process.poll() is None for process in self._processes), Path(self._log.name).read_text()
        try:
            return bool(self.ask(REPOSITORIES)["repositoriesOrError"].get("nodes"))
        except httpx.TransportError:
            return False

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        answer = self._client.post(f"{self.url}/graphql", json={"query": query, "variables": variables})
        body = answer.json()
        assert "errors" not in body, body["errors"]
        return body["data"]

    def launch(
        self,
        job: str,
        location: str | None = None,
        *,
        run_config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        assets: Sequence[str] = (),
    ) -> str:
        """As the launchpad does; with `assets` as the asset graph does, of the job that has them all."""
        found = self.ask(REPOSITORIES)["repositoriesOrError"]["nodes"]
        repository = next(one for one in found if location in (None, one["location"]["name"]))
        selector = {
            "jobName": job,
            "repositoryName": repository["name"],
            "repositoryLocationName": repository["location"]["name"],
            **({"assetSelection": [{"path": [key]} for key in assets]} if assets else {}),
        }
        metadata = {"tags": [{"key": key, "value": value} for key, value in (tags or {}).items()]}
        params = {"selector": selector, "runConfigData": run_config or {}, "executionMetadata": metadata}
        return _run_id(self.ask(LAUNCH, params=params)["launchRun"])

    def execute_again(self, run_id: str) -> str:
        """As a person does who starts a failed run anew from where it failed."""
        params = {"parentRunId": run_id, "strategy": "FROM_FAILURE", "useParentRunTags": True}
        return _run_id(self.ask(EXECUTE_AGAIN, params=params)["launchRunReexecution"])

    def status(self, run_id: str) -> str:
        return self.ask(STATUS, run=run_id)["runOrError"]["status"]

    def stdout(self, run_id: str, step: str) -> str:
        events = self.ask(FILE_KEYS, run=run_id)["runOrError"]["eventConnection"]["events"]
        key = next((event["fileKey"] for event in events if step in (event.get("stepKeys") or ())), None)
        return (self.ask(LOGS, key=[run_id, "compute_logs", key])["capturedLogs"]["stdout"] or "") if key else ""

    def close(self) -> None:
        self._client.close()
        for process in self._processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            process.wait(30)
        self._log.close()


def _run_id(launched: dict[str, Any]) -> str:
    assert launched["__typename"] == "LaunchRunSuccess", launched
    return launched["run"]["runId"]


@contextlib.contextmanager
def a_dagster(world: World, name: str, workspace: Path | None = None) -> Iterator[Dagster]:
    running = Dagster(world, name, workspace)
    try:
        wait_until(running.ready, PATIENCE_S, "the web server has loaded the code location")
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def a_code_server(file: Path, log: Path, port: int, context: Mapping[str, Any], *more: str) -> Iterator[None]:
    """As an operator starts one for each code location, with its own container context."""
    where = ["-f", str(file), "-d", str(file.parent), "-a", "defs", "-h", "127.0.0.1", "-p", str(port)]
    own = ["--container-context", json.dumps({"crater": context}), *more]
    command = [sys.executable, "-m", "dagster", "api", "grpc", *where, *own]
    with log.open("wb") as output:
        environment = {**os.environ, "DO_NOT_TRACK": "1"}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        wait_until(lambda: _listens(port), PATIENCE_S, f"a code server at {port}; see {log}")
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
