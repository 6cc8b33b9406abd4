"""The demo as the README starts it: the whole loop once, an interruption in the middle, and a step that fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from example_pipelines.demo.processes import leftovers, stop_leftovers
from example_pipelines.demo.show import COLUMNS

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300

pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home of the demo; whatever a failing test leaves there is ended."""
    yield tmp_path / "demo"
    stop_leftovers(tmp_path / "demo")


def start(home: Path, output: Path, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "example_pipelines.demo", "run", "--home", str(home)]
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_for(text: str, output: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + PATIENCE_S
    while text not in output.read_text(errors="replace"):
        assert process.poll() is None, output.read_text(errors="replace")
        assert time.monotonic() < until, output.read_text(errors="replace")
        time.sleep(0.1)


def rows_of(text: str) -> list[list[str]]:
    """Cells of the summary's rows: eight of them, two spaces or more apart."""
    _, _, table = text.partition("What ran, as the scheduler metered it")
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    return [cells for cells in rows if len(cells) == len(COLUMNS)]


def test_the_demo_runs_the_whole_loop_and_leaves_nothing(home: Path, tmp_path: Path):
    output = tmp_path / "output"
    process = start(home, output)
    code = process.wait(PATIENCE_S)
    text = output.read_text(errors="replace")
    assert code == 0, text
    assert "Everything is stopped." in text
    assert leftovers(home) == {}

    rows = {cells[0]: cells for cells in rows_of(text)}
    trainings = [cells for cells in rows.values() if "GPU" in cells[2]]
    assert len(trainings) == 1, text
    _, node, devices, _, _, gpu_hours, core_hours, outcome = trainings[0]
    assert (node, outcome) == ("gpu-node-01", "succeeded")
    assert devices.startswith("0.5 ")
    assert float(gpu_hours) > 0
    assert float(core_hours) > 0
    replicas = [cells for cells in rows_of(text) if cells[-1] == "running, ready"]
    assert sorted(cells[1] for cells in replicas) == ["cpu-node-01", "gpu-node-01"]
    for asset in ("raw_digits", "features", "trained_model", "evaluation", "digits_service", "batch_predictions"):
        assert any(asset in name for name in rows), (asset, text)

    accuracy = re.search(r"Accuracy: ([0-9.]+) on 360 images", text)
    assert accuracy is not None, text
    assert float(accuracy[1]) >= 0.95
    assert len(re.findall(r"Replica t\w+ on \w+-node-01: an image of a (\d) is a \1 ", text)) == 2
    assert "make up" in text
    assert str(home) in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_in_the_middle_leaves_nothing(home: Path, tmp_path: Path, number: signal.Signals):
    output = tmp_path / "output"
    process = start(home, output, CRATER_EXAMPLE_EPOCHS="500")
    wait_for("epoch  1/500", output, process)
    assert leftovers(home) != {}
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert leftovers(home) == {}
    assert "Everything is stopped." in output.read_text()


def test_a_step_that_fails_is_named_with_its_last_words(home: Path, tmp_path: Path):
    output = tmp_path / "output"
    process = start(home, output, CRATER_EXAMPLE_EPOCHS="0")
    code = process.wait(PATIENCE_S)
    text = output.read_text(errors="replace")
    assert code == 1, text
    assert "trained_model" in text
    assert "--epochs and --batch-size must be at least 1" in text
    assert leftovers(home) == {}
