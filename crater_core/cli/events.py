"""`crater events`: what happens, as it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from crater_core.cli.session import INTERRUPTED, Json, client, note, option, out, print_json_line
from crater_core.cli.show import clean, moment, status

if TYPE_CHECKING:
    from crater_core.wire.tasks import EventView

Subject = Literal["task", "node", "service"]


def events(
    group: Annotated[str | None, option("NAME", "Only tasks of this group.")] = None,
    subject: Annotated[Subject | None, typer.Option(help="Only these.")] = None,
    after: Annotated[int | None, option("SEQUENCE", "From this sequence on; 0 is the beginning. Else from now.", min=0)] = None,
    count: Annotated[int | None, option("COUNT", "End after this many.", "--count", "-n", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Watch what happens, until Ctrl-C. With --json, one object a line.

    [bold]crater events --subject node[/]

    [bold]crater events --json | jq -r '[.what, .id] | @tsv'[/]
    """
    left = count
    with client(patient=True) as crater:
        if not as_json:
            note("Watching; Ctrl-C ends it.")
        try:
            for event in crater.watch(group, after=after, subject=subject):
                print_json_line(event) if as_json else out().print(_line(event))
                left = None if left is None else left - 1
                if left == 0:
                    return
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _line(event: EventView) -> Text:
    line = Text.assemble((f"{moment(event.at_ms)}  ", "dim"), f"{event.subject} {clean(event.id)} ", status(event.what))
    if event.reason is not None and event.reason.code != "finished":
        line.append(f": {clean(event.reason.message)}")
    elif event.facts:
        line.append("  " + clean(", ".join(f"{name} {value}" for name, value in event.facts.items())), style="dim")
    return line


def register(app: typer.Typer) -> None:
    app.command("events", rich_help_panel="Cluster")(events)
