"""How things look: amounts, times, statuses and tables, in 80 columns. Text from elsewhere never reaches the terminal raw."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from crater_core.clock import SystemClock
from crater_core.model.units import show_bytes, show_duration, show_mib, show_milli

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from crater_core.wire.base import ReasonView
    from crater_core.wire.resources import AmountsView, GrantView
    from crater_core.wire.tasks import TaskView

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_STYLES = {
    "queued": "yellow",
    "allocated": "cyan",
    "running": "cyan",
    "succeeded": "green",
    "ready": "green",
    "failed": "red",
    "refused": "red",
    "lost": "red",
    "degraded": "red",
    "cancelled": "magenta",
    "deploying": "yellow",
    "removing": "magenta",
    "cordoned": "yellow",
    "draining": "yellow",
    "drained": "yellow",
}
NOTHING = "–"


def clean(text: str) -> str:
    """Without control characters, which could steer a terminal."""
    return _CONTROL.sub("�", text)


def status(word: str) -> Text:
    return Text(clean(word), style=_STYLES.get(word, ""))


def now_ms() -> int:
    return SystemClock().now_ms()


def ago(at_ms: int | None) -> str:
    return NOTHING if at_ms is None else show_duration(max(0, now_ms() - at_ms))


def moment(at_ms: int | None) -> str:
    """Local time; the day only when it is another one."""
    if at_ms is None:
        return NOTHING
    at, today = datetime.fromtimestamp(at_ms / 1000), datetime.now()
    return at.strftime("%H:%M:%S" if at.date() == today.date() else "%Y-%m-%d %H:%M:%S")


def size(count: int) -> str:
    """Bytes in the units they were asked for: round decimal amounts as MB, GB, TB, all others as MiB, GiB, TiB."""
    if count % 2**20:
        for unit, digits in (("TB", 12), ("GB", 9), ("MB", 6)):
            if count and count % 10**digits == 0:
                return f"{count // 10**digits} {unit}"
    return show_bytes(count)


def size_of(part: int, whole: int) -> str:
    """`2.3 of 4 GB`: both in the unit of the whole."""
    shown = size(whole)
    unit = shown.rpartition(" ")[2]
    digits = {"TB": 12, "GB": 9, "MB": 6}.get(unit)
    if digits is None:
        return f"{show_bytes(part)} of {shown}"
    return f"{f'{part / 10**digits:.1f}'.removesuffix('.0')} of {shown}"


def short(duration_ms: int) -> str:
    """A duration in at most seven characters."""
    return "0 s" if duration_ms <= 0 else show_duration(duration_ms if duration_ms < 1000 else duration_ms // 1000 * 1000)


def gpus(amounts: AmountsView) -> str:
    if amounts.gpu_milli:
        return show_milli(amounts.gpu_milli)
    return show_mib(amounts.gpu_memory_mib) if amounts.gpu_memory_mib else NOTHING


def amounts_line(amounts: AmountsView) -> str:
    """`4 cores, 16 GiB memory, 1 GPU`."""
    cores = show_milli(amounts.cpu_milli)
    parts = [f"{cores} core{'' if cores == '1' else 's'}"] if amounts.cpu_milli else []
    parts += [f"{size(amounts.memory_bytes)} memory"] if amounts.memory_bytes else []
    parts += [f"{size(amounts.disk_bytes)} disk"] if amounts.disk_bytes else []
    parts += [f"{show_milli(amounts.gpu_milli)} GPU"] if amounts.gpu_milli else []
    parts += [f"{show_mib(amounts.gpu_memory_mib)} GPU memory"] if amounts.gpu_memory_mib else []
    return ", ".join(parts) or "nothing"


def device_line(grant: GrantView) -> str:
    part = "whole" if grant.sharing == "exclusive" else f"{show_milli(grant.compute_milli)} by {grant.sharing}"
    simulated = ", simulated" if grant.simulated else ""
    return clean(f"GPU {grant.index} ({part}, {show_mib(grant.memory_mib)}{simulated}) {grant.uuid}")


def share(used: float, whole: float, width: int = 10) -> Text:
    """A small bar of what is taken."""
    part = 0.0 if whole <= 0 else min(1.0, max(0.0, used / whole))
    filled = round(part * width)
    colour = "red" if part > 0.9 else "yellow" if part > 0.7 else "green"
    return Text.assemble(("━" * filled, colour), ("━" * (width - filled), "dim"), f" {part:4.0%}" if whole > 0 else "     ")


def table(*columns: str, right: Iterable[str] = (), wrap: Iterable[str] = ()) -> Table:
    """Plain columns under quiet headings. Those named in `wrap` give way when the terminal is narrow; names among the
    others are cut with an ellipsis."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    right, wrap = set(right), set(wrap)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in wrap,
            overflow="fold" if column in wrap else "ellipsis",
        )
    return made


def facts(rows: Iterable[tuple[str, RenderableType | None]]) -> Table:
    """Name and value, a line each; those without a value are left out."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value is not None and value != "":
            made.add_row(name, Text(clean(value)) if isinstance(value, str) else value)
    return made


def reason_text(reason: ReasonView | None) -> Text | None:
    """The sentence, with the next step under it."""
    if reason is None:
        return None
    text = Text(clean(reason.message))
    if reason.next_step:
        text.append("\n→ " + clean(reason.next_step), style="bold")
    return text


def outcome_line(task: TaskView) -> Text:
    """How a task stands, in one line for the end of a command."""
    line = Text.assemble(f"{task.id} ", status(task.status))
    if task.ended and task.started_at_ms is not None:
        line.append(f" after {short(task.ran_ms)} on {clean(task.node or '?')}")
    if task.reason is not None and task.reason.code != "finished":
        line.append(f": {clean(task.reason.message)}")
        if task.reason.next_step:
            line.append(f" {clean(task.reason.next_step)}", style="bold")
    return line


def print_or_say(console: Console, made: Table, empty: str) -> None:
    """The table, or that there is nothing to show."""
    if made.row_count:
        console.print(made)
    else:
        from crater_core.cli.session import note

        note(empty)
