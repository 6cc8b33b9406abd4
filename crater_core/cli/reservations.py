"""`crater reserve`, `crater reservations`, `crater unreserve`: room for a project from one time to another."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer
from rich.text import Text

from crater_core.cli.session import Json, client, note, option, out, print_json
from crater_core.cli.show import NOTHING, clean, moment, print_or_say, size, table
from crater_core.errors import InvalidRequest
from crater_core.model.units import show_milli


def reserve(
    project: Annotated[str, option("NAME", "For whom.")],
    gpus: Annotated[int, option("COUNT", "Whole GPUs.", min=0)] = 0,
    cpu: Annotated[str | None, option("COUNT", "Cores, with the GPUs or alone.")] = None,
    memory: Annotated[str | None, option("SIZE", "128GB.")] = None,
    begins: Annotated[str | None, option("WHEN", "2026-12-01T08:00; else now.", "--from")] = None,
    ends: Annotated[str | None, option("WHEN", "Until then,", "--to")] = None,
    lasts: Annotated[str | None, option("TIME", "or for so long: 4h.", "--for")] = None,
    gpu_type: Annotated[list[str] | None, option("TYPE", "Of this type; several: any of them.")] = None,
    label: Annotated[list[str] | None, option("KEY=VALUE", "On nodes with this label.")] = None,
    name: Annotated[str | None, option("NAME", "Else one is made up.")] = None,
    reason: Annotated[str, option("TEXT", "Why, for those who ask.")] = "",
    as_json: Json = False,
) -> None:
    """Reserve room for a project in advance: others use it only if they will have ended by then.

    [bold]crater reserve --project vision --gpus 8 --from 2026-12-02T08:00 --for 4h[/]
    """
    body: dict[str, Any] = {"project": project, "gpus": gpus, "cpu": cpu, "memory": memory, "name": name, "reason": reason}
    body |= {"from_ms": _moment_ms(begins, "--from"), "to_ms": _moment_ms(ends, "--to"), "duration": lasts}
    body |= {"gpu_types": gpu_type or [], "node_labels": dict(_pair(one) for one in label or [])}
    with client() as crater:
        made = crater.reserve({key: value for key, value in body.items() if value is not None})
    if as_json:
        print_json(made)
        return
    where = ", ".join(part.node for part in made.parts)
    note(
        f"Reserved for {clean(project)} as {clean(made.name)}, {moment(made.from_ms)} to {moment(made.to_ms)}, on {clean(where)}."
    )


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InvalidRequest(f"--label must be KEY=VALUE, found {text!r}", field="label")
    return key, value


def _moment_ms(text: str | None, option_name: str) -> int | None:
    if text is None:
        return None
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f"{option_name} must be a date and time such as 2026-12-01T08:00, found {text!r}", field=option_name.lstrip("-")
        ) from None


def reservations(as_json: Json = False) -> None:
    """List what is reserved, for whom, when and where."""
    with client() as crater:
        found = crater.reservations()
    if as_json:
        print_json(found)
        return
    rows = table(
        "RESERVATION", "PROJECT", "GPU", "CPU", "MEMORY", "FROM", "TO", "ON", right=("GPU", "CPU", "MEMORY"), wrap=("ON",)
    )
    for one in found:
        rows.add_row(
            Text(clean(one.name), style="bold" if one.active else ""),
            Text(clean(one.project)),
            str(one.gpus) if one.gpus else NOTHING,
            show_milli(one.cpu_milli) if one.cpu_milli else NOTHING,
            size(one.memory_bytes) if one.memory_bytes else NOTHING,
            "now" if one.active else moment(one.from_ms),
            moment(one.to_ms),
            Text(clean(", ".join(part.node for part in one.parts))),
        )
    print_or_say(out(), rows, "Nothing is reserved. `crater reserve` does that.")


def unreserve(name: Annotated[str, typer.Argument(metavar="RESERVATION", show_default=False)]) -> None:
    """Give a reservation up."""
    with client() as crater:
        crater.cancel_reservation(name)
    note(f"Reservation {clean(name)} is given up.")


def register(app: typer.Typer) -> None:
    app.command("reserve", rich_help_panel="Cluster")(reserve)
    app.command("reservations", rich_help_panel="Cluster")(reservations)
    app.command("unreserve", rich_help_panel="Cluster")(unreserve)
