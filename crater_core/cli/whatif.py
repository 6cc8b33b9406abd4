"""`crater what-if`: what would become of a list of tasks, without submitting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.text import Text

from crater_core.cli.session import FAILED, Json, client, out, print_json
from crater_core.cli.show import NOTHING, clean, moment, table
from crater_core.errors import InvalidRequest

if TYPE_CHECKING:
    from crater_core.wire.whatif import DryRun, VerdictView

_STYLES = {"refused": "red", "placed": "green", "preempting": "magenta", "waiting": "yellow"}


def what_if(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML with `tasks:`, a list of them; - reads standard input.")],
    as_json: Json = False,
) -> None:
    """Say what would become of tasks: where each would run, whom it would stop, or why and until when it would wait.

    Nothing is submitted. Exit code 1 when one of them would be refused.
    """
    from crater_core.cli.submit import read_task_file

    tasks: Any = read_task_file(file).get("tasks")
    if not isinstance(tasks, list) or not tasks:
        raise InvalidRequest(f"{file} must hold `tasks:` with a list of at least one task", field="tasks")
    dry_run(cast("list[dict[str, Any]]", tasks), as_json)


def dry_run(tasks: list[dict[str, Any]], as_json: bool) -> None:
    with client() as crater:
        told = crater.dry_run(tasks)
    print_json(told) if as_json else out().print(_table(told))
    if any(verdict.outcome == "refused" for verdict in told.verdicts):
        raise typer.Exit(FAILED)


def _table(told: DryRun) -> Any:
    shown = table("NAME", "WOULD BE", "STARTS", "WHERE, OR WHY", wrap=("WHERE, OR WHY",))
    for verdict in told.verdicts:
        outcome = Text(verdict.outcome, style=_STYLES.get(verdict.outcome, ""))
        shown.add_row(Text(clean(verdict.name)), outcome, _starts(verdict), Text(clean(_where_or_why(verdict))))
    return shown


def _starts(verdict: VerdictView) -> str:
    if verdict.outcome in ("placed", "refused"):
        return "now" if verdict.outcome == "placed" else NOTHING
    if verdict.expected_start_ms is None:
        return "unknown"
    return f"{'' if verdict.expected_sure else 'about '}{moment(verdict.expected_start_ms)}"


def _where_or_why(verdict: VerdictView) -> str:
    if verdict.places:
        return ", ".join(place.node for place in verdict.places)
    parts = [verdict.reason.message, verdict.reason.next_step] if verdict.reason else []
    parts += [f"Stops {', '.join(verdict.victims)}."] if verdict.victims else []
    parts += [f"Start unknown: {verdict.expected_note}."] if verdict.expected_note else []
    return " ".join(part for part in parts if part)


def register(app: typer.Typer) -> None:
    app.command("what-if", rich_help_panel="Tasks")(what_if)
