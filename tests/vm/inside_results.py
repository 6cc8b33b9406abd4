"""Inside the guest: tells each test's outcome to the host, a line of JSON each, through a serial port."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

PORT = Path(os.environ["RESULTS"])


def _tell(**fields: object) -> None:
    with PORT.open("a") as port:
        port.write(json.dumps(fields) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        name = report.nodeid.rpartition("/")[2]
        _tell(test=name, outcome=report.outcome, seconds=round(report.duration, 1), text=report.longreprtext[-6000:])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome == "failed":
        _tell(test="collecting", outcome="failed", text=report.longreprtext[-6000:])
