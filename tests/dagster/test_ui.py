"""What people do and see in Dagster's own pages: launched through the run queue, live output, reasons, the end on request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster_service import TERMINATE, Dagster, a_dagster
from dagster_world import World
from harness import PATIENCE_S, wait_until
from playwright.sync_api import Page, expect, sync_playwright


@pytest.fixture(scope="module")
def dagster(logging_world: World) -> Iterator[Dagster]:
    with a_dagster(logging_world, "logging") as running:
        yield running


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        shown = browser.new_page(viewport={"width": 1500, "height": 900})
        shown.set_default_timeout(30_000)
        expect.set_options(timeout=30_000)
        yield shown
        browser.close()


@pytest.fixture(scope="module")
def finished(dagster: Dagster) -> str:
    """A run that was launched as the launchpad does: through the queue, by the daemon."""
    run_id = dagster.launch("loop")
    wait_until(lambda: dagster.status(run_id) in ("SUCCESS", "FAILURE"), PATIENCE_S, "the run has ended")
    assert dagster.status(run_id) == "SUCCESS", dagster.world.story(run_id)
    return run_id


def test_a_run_from_the_launchpad_goes_through_queue_and_daemon_to_the_nodes(dagster: Dagster, finished: str):
    assert dagster.world.task_of(finished, "right").node == "n-right"
    assert "left speaks on stdout" in dagster.stdout(finished, "left")


def test_the_output_of_a_step_is_read_while_it_runs_and_the_run_ends_on_request(dagster: Dagster):
    run_id = dagster.launch("talking")
    wait_until(lambda: "line 0" in dagster.stdout(run_id, "talks"), PATIENCE_S, "the step's first line")
    assert dagster.status(run_id) == "STARTED"
    assert dagster.ask(TERMINATE, run=run_id)["terminateRun"]["__typename"] == "TerminateRunSuccess"
    wait_until(lambda: dagster.status(run_id) == "CANCELED", PATIENCE_S, "the run is canceled")
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
    wait_until(lambda: dagster.status(run_id) == "FAILURE", PATIENCE_S, "the run has failed")
    page.goto(f"{dagster.url}/runs/{run_id}")
    expect(page.get_by_text("limit 300 MiB").first).to_be_visible()
    page.get_by_text("View tags and config").click()
    expect(page.get_by_text("crater/failure_reason: oom").first).to_be_visible()


def test_an_assets_page_shows_where_it_was_made_and_links_to_the_tasks_own_page(
    dagster: Dagster, page: Page, finished: str, tmp_path: Path
):
    page.goto(f"{dagster.url}/assets/right?view=events")
    expect(page.get_by_text("crater/node").first).to_be_visible()
    expect(page.get_by_text("n-right").first).to_be_visible()
    task = dagster.world.task_of(finished, "right")
    link = page.locator(f'a[href$="/#task={task.id}"]').first.get_attribute("href")
    assert link is not None
    page.goto(link)
    expect(page.locator("#task").get_by_text(task.id)).to_be_visible()
    expect(page.locator("#task").get_by_text("n-right")).to_be_visible()
    for what in ("queued", "allocated", "started", "succeeded"):
        expect(page.locator("#history").get_by_text(what, exact=True)).to_be_visible()
    page.screenshot(path=tmp_path / "task.png")
    page.goto(link.replace(task.id, "t0"))
    expect(page.get_by_text("knows no task t0")).to_be_visible()
