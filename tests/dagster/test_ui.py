"""What people do and see in Dagster's own pages: launched through the run queue, live output, reasons, the end on request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dagster_world import FILE, World
from harness import free_port, wait_until
from playwright.sync_api import Page, expect, sync_playwright

LAUNCH = """mutation ($job: String!, $repository: String!, $location: String!) {
  launchRun(executionParams: {
    selector: {jobName: $job, repositoryName: $repository, repositoryLocationName: $location}, runConfigData: {}}) {
    __typename ... on LaunchRunSuccess {run {runId}} ... on PythonError {message} } }"""
TERMINATE = "mutation ($run: String!) { terminateRun(runId: $run) { __typename ... on TerminateRunFailure {message} } }"
REPOSITORIES = "{ repositoriesOrError { ... on RepositoryConnection { nodes { name location { name } } } } }"
STATUS = "query ($run: ID!) { runOrError(runId: $run) { ... on Run { status } } }"
LOGS = "query ($key: [String!]!) { capturedLogs(logKey: $key) { stdout stderr } }"
FILE_KEYS = """query ($run: ID!) { runOrError(runId: $run) { ... on Run { eventConnection { events {
  ... on LogsCapturedEvent { fileKey stepKeys } } } } } }"""


class Dagster:
    """The real web server and the real daemon on the world's instance."""

    def __init__(self, world: World) -> None:
        self.world = world
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        home = world.place / "logging"
        environment = {**os.environ, "DAGSTER_HOME": str(home), "DO_NOT_TRACK": "1"}
        target = ["-f", str(FILE), "-d", str(FILE.parent), "-a", "defs"]
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
        assert all(process.poll() is None for process in self._processes), (self.world.place / "logging" / "web.log").read_text()
        try:
            return bool(self.ask(REPOSITORIES)["repositoriesOrError"].get("nodes"))
        except httpx.TransportError:
            return False

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        answer = self._client.post(f"{self.url}/graphql", json={"query": query, "variables": variables})
        body = answer.json()
        assert "errors" not in body, body["errors"]
        return body["data"]

    def launch(self, job: str) -> str:
        repository = self.ask(REPOSITORIES)["repositoriesOrError"]["nodes"][0]
        names = {"repository": repository["name"], "location": repository["location"]["name"]}
        launched = self.ask(LAUNCH, job=job, **names)["launchRun"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        return launched["run"]["runId"]

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


@pytest.fixture(scope="module")
def dagster(logging_world: World) -> Iterator[Dagster]:
    running = Dagster(logging_world)
    try:
        wait_until(running.ready, 60, "the web server has loaded the code location")
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": 1500, "height": 900})
        shown.set_default_timeout(30_000)
        yield shown
        browser.close()


@pytest.fixture(scope="module")
def finished(dagster: Dagster) -> str:
    """A run that was launched as the launchpad does: through the queue, by the daemon."""
    run_id = dagster.launch("loop")
    wait_until(lambda: dagster.status(run_id) in ("SUCCESS", "FAILURE"), 60, "the run has ended")
    assert dagster.status(run_id) == "SUCCESS", dagster.world.story(run_id)
    return run_id


def test_a_run_from_the_launchpad_goes_through_queue_and_daemon_to_the_nodes(dagster: Dagster, finished: str):
    assert dagster.world.task_of(finished, "right").node == "n-right"
    assert "left speaks on stdout" in dagster.stdout(finished, "left")


def test_the_output_of_a_step_is_read_while_it_runs_and_the_run_ends_on_request(dagster: Dagster):
    run_id = dagster.launch("talking")
    wait_until(lambda: "line 0" in dagster.stdout(run_id, "talks"), 60, "the step's first line")
    assert dagster.status(run_id) == "STARTED"
    assert dagster.ask(TERMINATE, run=run_id)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    wait_until(lambda: dagster.status(run_id) == "CANCELED", 30, "the run is canceled")
    dagster.world.no_task_lives(run_id)


def test_the_run_page_shows_steps_events_and_output(dagster: Dagster, page: Page, finished: str, tmp_path: Path):
    page.goto(f"{dagster.url}/runs/{finished}")
    for step in ("left", "right", "both"):
        expect(page.get_by_text(step, exact=True).first).to_be_visible()
    expect(page.get_by_text("is handed to the scheduler").first).to_be_visible()
    page.goto(f'{dagster.url}/runs/{finished}?selection=name:"left"')
    page.get_by_text("stdout", exact=True).first.click()
    expect(page.get_by_text("left speaks on stdout").first).to_be_visible()
    page.screenshot(path=tmp_path / "run.png")


def test_the_run_page_says_why_a_step_was_killed_with_the_numbers(dagster: Dagster, page: Page):
    run_id = dagster.launch("hungry")
    wait_until(lambda: dagster.status(run_id) == "FAILURE", 60, "the run has failed")
    page.goto(f"{dagster.url}/runs/{run_id}")
    expect(page.get_by_text("limit 300 MiB").first).to_be_visible()
    page.get_by_text("View tags and config").click()
    expect(page.get_by_text("crater/failure_reason: oom").first).to_be_visible()


def test_an_assets_page_shows_where_it_was_made(dagster: Dagster, page: Page, finished: str):
    page.goto(f"{dagster.url}/assets/right?view=events")
    expect(page.get_by_text("crater/node").first).to_be_visible()
    expect(page.get_by_text("n-right").first).to_be_visible()
