"""`crater debug`: what the scheduler decides from as a file for a report, and the decision made from it again, offline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from crater_core.cli.session import Json, client, duration_ms, note, option, out, print_json
from crater_core.cli.show import clean, reason_text, table
from crater_core.errors import BadConfiguration

if TYPE_CHECKING:
    from crater_core.model.plan import Plan
    from crater_core.model.snapshot import Snapshot

app = typer.Typer(help="Take a decision of the scheduler elsewhere, without secrets.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]


@app.command("snapshot")
def snapshot(file: File) -> None:
    """Write what the scheduler decides from to a file: no commands, environments, images, mounts, labels of tasks or addresses.

    Names of tasks, projects, users and nodes are in it.
    """
    with client() as crater:
        data = crater.debug_snapshot()
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:  # noqa: PTH123
            target.write(data)
    except OSError as error:
        raise BadConfiguration(f"{file} cannot be written: {error.strerror}") from error
    note(f"Wrote {len(data):,} bytes to {file}; `crater debug replay {file}` makes the next decision from it.")


@app.command("replay")
def replay(
    file: File,
    task: Annotated[str | None, option("ID", "Show every node with its score, or what is amiss with it, for this task.")] = None,
    after: Annotated[str, option("TIME", "Decide for so long after the snapshot was taken.")] = "0s",
    as_json: Json = False,
) -> None:
    """Make the next decision from a snapshot, without a scheduler: placements, whom they stop, and why the others wait."""
    from crater_core.scheduling import explain, schedule
    from crater_core.store.snapshot_file import read_snapshot

    try:
        seen, taken_ms = read_snapshot(file.read_bytes(), file.name)
    except OSError as error:
        raise BadConfiguration(f"{file} cannot be read: {error.strerror}") from error
    now_ms = taken_ms + duration_ms(after, "after")
    view = None
    if task is not None:
        from crater_core.wire.tasks import ExplanationView

        view = ExplanationView.of(explain(seen, task, now_ms), seen.tasks[task].status.value)
    plan = schedule(seen, now_ms)
    if as_json:
        told = _told(seen, plan, now_ms)
        print_json(told if view is None else {**told, "explanation": view.model_dump(mode="json")})
        return
    _print(seen, plan)
    if view is not None:
        from crater_core.cli.tasks import print_explanation

        print_explanation(view)


def _told(seen: Snapshot, plan: Plan, now_ms: int) -> dict[str, Any]:
    from crater_core.wire.base import ReasonView

    return {
        "revision": seen.revision,
        "at_ms": now_ms,
        "placements": [
            {
                "task": placement.task,
                "member": placement.member,
                "node": placement.node,
                "gpus": [[grant.uuid, grant.compute_milli, grant.memory_mib] for grant in placement.grants],
            }
            for placement in plan.placements
        ],
        "preemptions": [
            {"allocation": one.victim, "task": seen.allocations[one.victim].task, "for": one.preemptor}
            for one in plan.preemptions
        ],
        "waiting": {
            task: view.model_dump(mode="json")
            for task, reason in sorted(plan.waiting.items())
            if (view := ReasonView.of(reason)) is not None
        },
    }


def _print(seen: Snapshot, plan: Plan) -> None:
    from crater_core.wire.base import ReasonView

    console = out()
    live = f"{len(seen.nodes)} nodes, {len(seen.allocations)} allocations, {len(seen.queued)} queued"
    console.print(f"Revision {seen.revision}: {live}.")
    rows = table("TASK", "NAME", "DECISION", wrap=("DECISION",))
    for placement in plan.placements:
        gpus = ", ".join(f"{grant.uuid} ({grant.compute_milli / 1000:g})" for grant in placement.grants)
        where = f"starts on {placement.node}" + (f" with {gpus}" if gpus else "")
        rows.add_row(*_of(seen, placement.task), Text(clean(where), style="green"))
    for one in plan.preemptions:
        victim = seen.allocations[one.victim].task
        rows.add_row(*_of(seen, victim), Text(clean(f"is stopped for {one.preemptor}"), style="magenta"))
    for task, reason in sorted(plan.waiting.items()):
        rows.add_row(*_of(seen, task), reason_text(ReasonView.of(reason)) or Text())
    console.print(rows)


def _of(seen: Snapshot, task: str) -> tuple[Text, Text]:
    return Text(task), Text(clean(seen.tasks[task].spec.name))


def register(commands: typer.Typer) -> None:
    commands.add_typer(app, name="debug", rich_help_panel="Cluster")
