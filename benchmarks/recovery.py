"""`python -m benchmarks.recovery`: how soon a scheduler serves again whose SQLite store holds 100,000 waiting tasks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from crater_core.lifecycle.changes import Changes
from crater_core.model.history import Event
from crater_core.model.resources import Request
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.store import SqliteStore

TASKS = 100_000
STEP = 5_000
TARGET_S = 3.0


def fill(path: Path) -> None:
    """As if all of them had been submitted: each with the line of its history."""
    store = SqliteStore(path)
    term = store.begin_term()
    spec = TaskSpec("job", command=("python", "train.py"), request=Request(1000, 2**30, 0, None), labels={"team": "vision"})
    for start in range(0, TASKS, STEP):
        tasks = [Task(f"t{n:018}", spec, TaskStatus.QUEUED, 1, 1) for n in range(start, start + STEP)]
        events = tuple(Event(1, "task", task.id, "queued") for task in tasks)
        store.commit(Changes(tuple(tasks), (), events), start // STEP, term)
    store.close()


def recovery_s(folder: Path) -> float:
    """From the start of the process until it says that it is ready."""
    config = folder / "scheduler.yaml"
    config.write_text(f"listen: 127.0.0.1:0\ndata_dir: {folder}\nmetrics: {{enabled: false}}\n")
    command = [sys.executable, "-m", "crater_core.service.main", "--config", str(config)]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert b"is ready" in line, line
            return time.monotonic() - began
        finally:
            process.kill()


def median_recovery_s(rounds: int = 3) -> float:
    with tempfile.TemporaryDirectory() as name:
        fill(Path(name) / "crater.db")
        return sorted(recovery_s(Path(name)) for _ in range(rounds))[rounds // 2]


def main() -> None:
    print(f"scale.recovery: {median_recovery_s():.2f} s (median of 3), target {TARGET_S} s")


if __name__ == "__main__":
    main()
