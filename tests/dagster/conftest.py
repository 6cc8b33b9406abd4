"""A real scheduler, two real agents, and a real Dagster instance on SQLite, for all tests of this folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from dagster_world import World, a_home, a_node, load
from harness import PATIENCE_S, SchedulerProcess, start_scheduler, wait_until

from crater_core.client import CraterClient


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longer than two waits of a test may last, so that it is a wait that tells what did not happen."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(2 * PATIENCE_S + 60))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails tells what its runs went through, and what else the nodes had to do."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, World):
                report.sections.append((f"The last runs and the live tasks of {name}", value.told()))
    return report


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A directory with a short path."""
    path = Path(tempfile.mkdtemp(prefix="crater-dagster-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def scheduler(place: Path) -> Iterator[SchedulerProcess]:
    with start_scheduler(place / "scheduler-home") as running:
        yield running


@pytest.fixture(scope="session")
def cluster(place: Path, scheduler: SchedulerProcess) -> Iterator[CraterClient]:
    agents = [a_node(place, scheduler.url, "n-left", "left", True), a_node(place, scheduler.url, "n-right", "right", False)]
    client = CraterClient(scheduler.url)
    try:
        wait_until(lambda: client.health().nodes_ready == 2, PATIENCE_S, "two nodes")
        yield client
    finally:
        client.close()
        for agent in agents:
            agent.stop()


@pytest.fixture(scope="session")
def world(place: Path, scheduler: SchedulerProcess, cluster: CraterClient) -> Iterator[World]:
    """An instance whose runs may be resumed."""
    monitoring = {"enabled": True, "max_resume_run_attempts": 2}
    with World.open(a_home(place, scheduler.url, "dagster", run_monitoring=monitoring), cluster) as running:
        yield running


@pytest.fixture(scope="session")
def logging_world(place: Path, scheduler: SchedulerProcess, cluster: CraterClient) -> Iterator[World]:
    """An instance whose steps' output stays on the nodes, and whose runs are not resumed."""
    logs = {"module": "crater_dagster", "class": "CraterComputeLogManager"}
    with World.open(a_home(place, scheduler.url, "logging", compute_logs=logs), cluster) as running:
        yield running


@pytest.fixture(scope="session")
def rules_world(place: Path, scheduler: SchedulerProcess, cluster: CraterClient) -> Iterator[World]:
    """An instance that starts failed runs anew and resumes runs, with the jobs of `pipelines_rules.py`."""
    file = Path(__file__).parent / "pipelines_rules.py"
    options = {"labels": load(file).labels_from("launcher"), "resources": {"memory": "320MiB"}}
    monitoring = {"enabled": True, "max_resume_run_attempts": 2}
    further = {"run_retries": {"enabled": True, "max_retries": 0}, "run_monitoring": monitoring}
    home = a_home(place, scheduler.url, "rules", options, **further)
    with World.open(home, cluster, file) as running:
        yield running
