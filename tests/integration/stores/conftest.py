"""Closes what a test opened towards its schedulers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from callers import clients
from harness import SchedulerProcess


@pytest.fixture(autouse=True)
def _close_clients() -> Iterator[None]:
    yield
    while clients:
        clients.pop().close()


@pytest.fixture
def own() -> Iterator[list[SchedulerProcess]]:
    """Schedulers that a test starts for itself; they are ended with it."""
    started: list[SchedulerProcess] = []
    yield started
    for process in started:
        process.kill()
