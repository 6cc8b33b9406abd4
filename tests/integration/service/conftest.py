"""A scheduler for a module's tests, and agents that are nothing but their HTTP calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from callers import GIB as GIB
from callers import Api as Api
from callers import FakeAgent as FakeAgent
from callers import clients
from harness import SchedulerProcess, start_scheduler


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while clients:
        clients.pop().close()


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """One scheduler for all tests of a module; each test brings nodes and groups with names of its own."""
    with start_scheduler(tmp_path_factory.mktemp("scheduler")) as process:
        yield process


@pytest.fixture
def api(scheduler: SchedulerProcess) -> Api:
    return Api(scheduler.url)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[list[SchedulerProcess]]:
    """Schedulers that a test starts for itself; they are ended with it."""
    started: list[SchedulerProcess] = []
    yield started
    for process in started:
        process.kill()
