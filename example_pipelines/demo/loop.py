"""Runs the loop through Dagster's GraphQL API, as its web page does: launch, follow event by event, terminate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from example_pipelines.demo.processes import DemoFailed

LAUNCH = """
mutation Launch($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
    ... on PipelineNotFoundError { message }
  }
}"""
LOCATIONS = """
query { workspaceOrError { __typename
  ... on PythonError { message }
  ... on Workspace { locationEntries { name loadStatus locationOrLoadError { __typename
    ... on PythonError { message stack }
    ... on RepositoryLocation { name repositories { name jobs { name } } } } } } } }"""
FOLLOW = """
query Follow($run: ID!, $cursor: String) {
  logsForRun(runId: $run, afterCursor: $cursor, limit: 500) { __typename
    ... on PythonError { message }
    ... on EventConnection { cursor hasMore events { __typename
      ... on MessageEvent { message stepKey timestamp level }
      ... on ExecutionStepFailureEvent { error { message causes { message } } }
      ... on RunFailureEvent { error { message causes { message } } }
      ... on EngineEvent { error { message } }
      ... on MaterializationEvent { assetKey { path } }
      ... on AssetCheckEvaluationEvent { evaluation { checkName success } } } } }
  runOrError(runId: $run) { __typename ... on Run { status } }
}"""
TERMINATE = """
mutation Terminate($run: String!) {
  terminateRun(runId: $run, terminatePolicy: SAFE_TERMINATE) { __typename }
}"""
FINAL = ("SUCCESS", "FAILURE", "CANCELED")


@dataclass(frozen=True, slots=True)
class Happened:
    """One event of the run. `kind` is Dagster's name of it."""

    kind: str
    step: str | None
    message: str
    error: str = ""


@dataclass
class Dagster:
    """The web server's API."""

    url: str
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60.0))

    def __enter__(self) -> Dagster:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        try:
            response = self.client.post(f"{self.url}/graphql", json={"query": query, "variables": variables})
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise DemoFailed(f"Dagster's API at {self.url} did not answer: {error}") from error
        if answer.get("errors"):
            raise DemoFailed(f"Dagster's API refused: {answer['errors'][0]['message']}")
        return answer["data"]

    def location(self) -> tuple[str, str]:
        """Names of the code location and its repository. Raises DemoFailed when the code could not be loaded."""
        workspace = self.ask(LOCATIONS)["workspaceOrError"]
        for entry in workspace.get("locationEntries", ()):
            found = entry["locationOrLoadError"] or {}
            if found.get("__typename") == "RepositoryLocation":
                return found["name"], found["repositories"][0]["name"]
            if found:
                raise DemoFailed(f"Dagster could not load the example: {found['message']}")
        raise DemoFailed(f"Dagster has no code location: {workspace.get('message', 'the workspace is empty')}")

    def launch(self, job: str) -> str:
        location, repository = self.location()
        selector = {"repositoryLocationName": location, "repositoryName": repository, "jobName": job}
        answer = self.ask(LAUNCH, params={"selector": selector, "mode": "default"})["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            why = answer.get("message") or "; ".join(error["message"] for error in answer.get("errors", ()))
            raise DemoFailed(f"Dagster did not launch {job}: {answer['__typename']}: {why}")
        return answer["run"]["runId"]

    def follow(self, run: str, seen: Callable[[Happened], None], wait: Callable[[], None], timeout_s: float) -> str:
        """Hand every event to `seen`, in order, until the run is final; answers its status."""
        cursor, until = None, time.monotonic() + timeout_s
        while True:
            answer = self.ask(FOLLOW, run=run, cursor=cursor)
            logs, status = answer["logsForRun"], answer["runOrError"].get("status", "")
            for event in logs.get("events", ()):
                seen(_happened(event))
            cursor = logs.get("cursor", cursor)
            if logs.get("hasMore"):
                continue
            if status in FINAL:
                return status
            if time.monotonic() > until:
                raise DemoFailed(f"the run was still {status} after {timeout_s:.0f} s")
            wait()

    def terminate(self, run: str) -> None:
        self.ask(TERMINATE, run=run)


def _happened(event: dict[str, Any]) -> Happened:
    message = event.get("message") or ""
    if event["__typename"] == "MaterializationEvent":
        message = "/".join((event.get("assetKey") or {}).get("path", ()))
    if event["__typename"] == "AssetCheckEvaluationEvent":
        evaluation = event["evaluation"]
        message = f"{evaluation['checkName']} {'passed' if evaluation['success'] else 'FAILED'}"
    return Happened(event["__typename"], event.get("stepKey"), message, _error(event.get("error")))


def _error(error: dict[str, Any] | None) -> str:
    if not error:
        return ""
    causes = [cause["message"].strip() for cause in error.get("causes") or ()]
    return "\n".join([error["message"].strip(), *causes])
