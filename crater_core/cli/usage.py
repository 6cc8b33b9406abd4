"""`crater usage`, `crater shares`: hours held, and what each project holds now and lately."""

from __future__ import annotations

import csv
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from crater_core.cli.session import Json, client, note, option, out, print_json
from crater_core.cli.show import NOTHING, clean, now_ms, print_or_say, table
from crater_core.errors import InvalidRequest
from crater_core.model.units import parse_duration_ms, show_duration, show_milli

if TYPE_CHECKING:
    from crater_core.wire.usage import ShareView

By = Literal["project", "user", "quota_policy", "node", "task", "name"]


def usage(
    by: Annotated[By, typer.Option(help="What a row stands for.")] = "project",
    since: Annotated[str | None, option("WHEN", "2026-12-01, 2026-12-01T08:00, or an age: 24h, 7d.", "--from")] = None,
    until: Annotated[str | None, option("WHEN", "Likewise; else now.", "--to")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma separated, for a spreadsheet.")] = False,
    as_json: Json = False,
) -> None:
    """Report what was held between two times. A quarter of a GPU for four hours is one GPU-hour.

    [bold]crater usage --by user --from 7d[/]

    [bold]crater usage --by project --from 2026-11-01 --to 2026-12-01 --csv > november.csv[/]
    """
    if as_csv and as_json:
        raise InvalidRequest("--csv or --json, not both")
    with client() as crater:
        report = crater.usage(by, time_ms(since, "--from"), time_ms(until, "--to"))
    if as_json:
        print_json(report)
        return
    rows = sorted(report.rows, key=lambda row: (-row.gpu_hours, -row.core_hours, row.key))
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([by, "tasks", "gpu_hours", "core_hours", "gb_hours"])
        writer.writerows([_cell(r.key), r.tasks, f"{r.gpu_hours:.6f}", f"{r.core_hours:.6f}", f"{r.gb_hours:.6f}"] for r in rows)
        return
    shown = table(
        by.replace("_", " ").upper(),
        "TASKS",
        "GPU-HOURS",
        "CORE-HOURS",
        "GB-HOURS",
        right=("TASKS", "GPU-HOURS", "CORE-HOURS", "GB-HOURS"),
        wrap=(by.replace("_", " ").upper(),),
    )
    for row in rows:
        shown.add_row(
            Text(clean(row.key or "(none)")), str(row.tasks), *(_hours(h) for h in (row.gpu_hours, row.core_hours, row.gb_hours))
        )
    if len(rows) > 1:
        sums = [sum(getattr(row, field) for row in rows) for field in ("gpu_hours", "core_hours", "gb_hours")]
        shown.add_section()
        shown.add_row("all", str(sum(row.tasks for row in rows)), *(_hours(total) for total in sums), style="bold")
    print_or_say(out(), shown, "Nothing was held in that time.")


def shares(as_json: Json = False) -> None:
    """What part of the cluster each project holds, and held on average lately.

    Among waiting tasks of one priority, the project with the smaller share goes first.
    """
    with client() as crater:
        page = crater.shares()
    if as_json:
        print_json(page)
        return
    columns = ("PROJECT", "SHARE", "HOLDS", "LATELY", "GPU", "CPU", "WEIGHT")
    shown = table(*columns, right=columns[1:], wrap=("PROJECT",))
    for one in page.shares:
        parts = (f"{milli / 10:.1f} %" for milli in (one.share_milli, one.held_milli, one.average_milli))
        amounts = (f"{show_milli(now)} ({show_milli(past)})" for now, past in _now_and_lately(one))
        shown.add_row(Text(clean(one.project)), *parts, *amounts, show_milli(one.weight_milli))
    print_or_say(out(), shown, "No project holds anything, or did lately.")
    if page.shares and page.half_life_ms:
        note(f"Lately, and in brackets: the average, in which use counts half after {show_duration(page.half_life_ms)}.")


def _now_and_lately(one: ShareView) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one.held.gpu_milli, one.average.gpu_milli), (one.held.cpu_milli, one.average.cpu_milli)


def _hours(hours: float) -> str:
    return NOTHING if hours == 0 else f"{hours:,.2f}" if hours >= 1 else f"{hours:.4f}"


def _cell(text: str) -> str:
    """A spreadsheet must not take a task's name for a formula."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def time_ms(text: str | None, option: str) -> int | None:
    """Milliseconds since the epoch from a local date, date and time, or an age."""
    if text is None:
        return None
    try:
        return now_ms() - parse_duration_ms(text) if text[-1:].isalpha() and text[-1:] != "Z" else _date_ms(text)
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f"{option} must be a date (2026-12-01), a date and time (2026-12-01T08:00) or an age (24h, 7d), found {text!r}",
            field=option.lstrip("-"),
        ) from None


def _date_ms(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def register(app: typer.Typer) -> None:
    app.command("usage", rich_help_panel="Cluster")(usage)
    app.command("shares", rich_help_panel="Cluster")(shares)
