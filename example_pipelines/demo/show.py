"""What the demo prints: lines of progress while the loop runs, and the summary that is read from the scheduler."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from crater_core.wire.tasks import TaskView
from example_pipelines.demo.loop import Happened

_NUMBERS = ("waited", "ran", "GPU-hours", "core-hours")
COLUMNS = ("task", "node", "devices", "waited", "ran", "GPU-hours", "core-hours", "outcome")
PLAIN_WIDTH = 140
WIDE = 130
"""A terminal this wide shows each task on one line."""
_OURS = re.compile(r"\btask t\w{10,}")
"""Events that tell of a task: where it runs, or why it waits."""
_LINES = {
    "ExecutionStepStartEvent": ("started", "cyan"),
    "ExecutionStepSuccessEvent": ("done", "green"),
    "ExecutionStepFailureEvent": ("FAILED", "bold red"),
    "ExecutionStepUpForRetryEvent": ("will be tried again", "yellow"),
    "ExecutionStepSkippedEvent": ("skipped", "yellow"),
}


@dataclass
class Screen:
    """Coloured and with a moving line at the bottom on a terminal; plain lines elsewhere."""

    console: Console = field(default_factory=lambda: _console())
    started: float = field(default_factory=time.monotonic)
    _status: Status | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def say(self, who: str, what: str, style: str = "") -> None:
        line = Text(f"{self.seconds:6.1f} s  ", style="dim")
        line.append(f"{who:<20} ", style="bold" if who else "")
        line.append(what, style=style)
        self.console.print(line, soft_wrap=True)

    def busy(self, what: str) -> None:
        """What is going on, on the moving line of a terminal."""
        if not self.console.is_terminal:
            return
        if self._status is None:
            self._status = self.console.status(what)
            self._status.start()
        self._status.update(what)

    def calm(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def event(self, happened: Happened) -> None:
        """One line for what a person wants to see of a run, nothing for the rest."""
        who = happened.step or "run"
        if happened.kind in _LINES:
            what, style = _LINES[happened.kind]
            self.say(who, what, style)
            if happened.kind == "ExecutionStepStartEvent":
                self.busy(f"{who} is running")
        elif happened.kind == "LogMessageEvent" and not happened.message.startswith("[pipes]"):
            self.say(who, happened.message)
        elif happened.kind == "EngineEvent" and _OURS.search(happened.message):
            self.say(who, happened.message, "dim")
        elif happened.kind == "AssetCheckEvaluationEvent":
            self.say(who, f"check {happened.message}", "green" if happened.message.endswith("passed") else "bold red")

    def table(self, tasks: Sequence[TaskView]) -> None:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
        whole = self.console.width >= WIDE
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=whole, overflow="fold")
        for task in tasks:
            cells = row(task)
            style = "" if task.status in ("succeeded", "running") else "red"
            table.add_row(*cells, style=style)
        table.add_section()
        table.add_row("all", "", "", "", "", *totals(tasks), "", style="bold")
        self.console.print("\n[bold]What ran, as the scheduler metered it[/]\n")
        self.console.print(table)


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def row(task: TaskView) -> tuple[str, ...]:
    """A task as the table shows it, in the order of COLUMNS."""
    return (
        task.name,
        task.node or "",
        devices(task),
        seconds(task.waited_ms),
        seconds(task.ran_ms) if task.started_at_ms is not None else "",
        f"{task.gpu_hours:.5f}",
        f"{task.core_hours:.5f}",
        outcome(task),
    )


def totals(tasks: Sequence[TaskView]) -> tuple[str, str]:
    return f"{sum(task.gpu_hours for task in tasks):.5f}", f"{sum(task.core_hours for task in tasks):.5f}"


def devices(task: TaskView) -> str:
    """Shares of GPUs, then cores: "0.5 simulated GPU, 0.75 cores"."""
    parts = [f"{grant.compute_milli / 1000:g} {'simulated ' if grant.simulated else ''}GPU" for grant in task.devices]
    return ", ".join([*parts, cores(task.requested.cpu_milli)])


def cores(cpu_milli: int) -> str:
    return f"{cpu_milli / 1000:g} core{'' if cpu_milli == 1000 else 's'}"


def seconds(ms: int) -> str:
    return f"{ms / 1000:.2f} s" if ms < 60_000 else f"{ms // 60_000} min {ms % 60_000 / 1000:.0f} s"


def outcome(task: TaskView) -> str:
    if task.status == "running" and task.ready:
        return "running, ready"
    if task.status in ("succeeded", "running") or task.reason is None:
        return task.status
    return f"{task.status}: {task.reason.message}"
