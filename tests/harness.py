"""Starts real processes for tests on free ports in a folder of their own, waits until they serve, and ends them again."""

from __future__ import annotations

import atexit
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

READY_S = 20.0
_running: set[subprocess.Popen[bytes]] = set()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


PATIENCE_S = 150.0
"""For what begins with cold starts of Python and Dagster: seconds on an idle machine, more than a minute on one that is full."""


def wait_until(done: Callable[[], Any], timeout_s: float = 10.0, what: str = "") -> Any:
    """The first true answer of `done`, asked again and again for a bounded time."""
    until = time.monotonic() + timeout_s
    while True:
        answer = done()
        if answer:
            return answer
        if time.monotonic() > until:
            raise AssertionError(f"not within {timeout_s} s: {what or done}")
        time.sleep(0.01)


class SchedulerProcess:
    """A `crater-scheduler` of its own. `restart` keeps address and data."""

    def __init__(self, folder: Path, overrides: dict[str, Any]) -> None:
        self.folder = folder
        self.port, self.metrics_port = free_port(), free_port()
        self.config: dict[str, Any] = {
            "listen": f"127.0.0.1:{self.port}",
            "data_dir": str(folder / "scheduler"),
            "metrics": {"port": self.metrics_port},
            **overrides,
        }
        self.url = f"http://{self.config['listen']}"
        self.metrics_url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        self.config_path = folder / "scheduler.yaml"
        self.log_path = folder / "scheduler.log"
        self.database = folder / "scheduler" / "crater.db"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> SchedulerProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config_path.write_text(yaml.safe_dump(self.config), "utf-8")
        command = [sys.executable, "-m", "crater_core.service.main", "--config", str(self.config_path)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL)
        _running.add(self.process)
        line = read_line(self.process, READY_S)
        if "is ready at" not in line:
            self.kill()
            raise AssertionError(f"the scheduler did not start: {line!r}\n{self.log_path.read_text()}")
        return self

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        """Like a power cut for the process: SIGKILL."""
        self._end(signal.SIGKILL, 10.0)

    def stop(self, timeout_s: float = 10.0) -> int:
        """As asked, with SIGTERM; gives the exit code."""
        return self._end(signal.SIGTERM, timeout_s)

    def _end(self, sig: int, timeout_s: float) -> int:
        process = self.process
        if process is None:
            return 0
        try:
            if process.poll() is None:
                process.send_signal(sig)
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the scheduler did not end within {timeout_s} s\n{self.log_path.read_text()}") from None
        finally:
            if process.stdout is not None:
                process.stdout.close()
            _running.discard(process)
            self.process = None

    def restart(self) -> SchedulerProcess:
        """Stop it if it runs, and start again with the same address and data."""
        self.stop()
        return self.start()

    def log_text(self) -> str:
        return self.log_path.read_text("utf-8")

    def __enter__(self) -> SchedulerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def start_scheduler(tmp_path: Path, **overrides: Any) -> SchedulerProcess:
    """A scheduler that serves already. `overrides` are keys of scheduler.yaml. Use as a context manager, or call `kill`."""
    return SchedulerProcess(tmp_path, overrides).start()


def read_line(process: subprocess.Popen[bytes], timeout_s: float) -> str:
    """The first line of a process's output; what there is of it when the process ends or the time is over."""
    assert process.stdout is not None
    text, until = b"", time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"\n" not in text and selector.select(max(0.0, until - time.monotonic())):
            chunk = os.read(process.stdout.fileno(), 4096)
            if not chunk:
                break
            text += chunk
    return text.decode("utf-8", "replace")


@atexit.register
def _end_all() -> None:
    for process in list(_running):
        process.kill()
        process.wait()
