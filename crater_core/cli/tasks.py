"""`crater list, show, explain, wait, cancel`: tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from crater_core.cli.arrays import how, is_array, show_array, wait_for, well
from crater_core.cli.session import FAILED, INTERRUPTED, Json, client, duration_ms, err, note, option, out, print_json
from crater_core.cli.show import (
    NOTHING,
    ago,
    amounts_line,
    clean,
    device_line,
    facts,
    gpus,
    moment,
    print_or_say,
    reason_text,
    short,
    size,
    status,
    table,
)
from crater_core.cli.submit import detached
from crater_core.clock import SystemClock
from crater_core.errors import CraterError, InvalidRequest
from crater_core.model.units import show_mib, show_milli

if TYPE_CHECKING:
    from crater_core.wire.arrays import ArrayView
    from crater_core.wire.tasks import EventView, ExplanationView, TaskView

TaskId = Annotated[str, typer.Argument(metavar="TASK", help="A task's id, as `crater list` shows it.", show_default=False)]
Many = list[str] | None
LIVE = ("queued", "allocated", "running")


def list_tasks(
    status_: Annotated[
        Many, option("STATUS", "queued, allocated, running, succeeded, failed, cancelled.", "--status", "-s")
    ] = None,
    live: Annotated[bool, typer.Option("--live", "-l", help="Only what waits or runs.")] = False,
    project: Annotated[str | None, option("NAME", "Of this project.")] = None,
    by: Annotated[str | None, option("USER", "Of this user.", "--of")] = None,
    name: Annotated[str | None, option("NAME", "Of this name.")] = None,
    group: Annotated[str | None, option("NAME", "Of this group.")] = None,
    service: Annotated[str | None, option("NAME", "Replicas of this service.")] = None,
    array: Annotated[str | None, option("ARRAY", "Tasks of this array.")] = None,
    label: Annotated[Many, option("KEY=VALUE", "With this label, KEY=VALUE; several times: all of them.")] = None,
    limit: Annotated[int, option("COUNT", "At most this many.", "--limit", "-n", min=1)] = 50,
    wide: Annotated[bool, typer.Option("--wide", "-w", help="More columns.")] = False,
    as_json: Json = False,
) -> None:
    """List tasks, newest first: where each runs, or why it waits.

    [bold]crater list --live[/]  [dim]what waits or runs[/]

    [bold]crater list --status failed --project vision[/]
    """
    statuses = [*(status_ or ()), *(LIVE if live else ())]
    labels = dict(_pair(text) for text in label or ())
    with client() as crater:
        found = list(
            crater.tasks(
                status=statuses,
                project=project,
                user=by,
                name=name,
                group=group,
                service=service,
                labels=labels,
                array=array,
                limit=limit,
            )
        )
    if as_json:
        print_json(found)
        return
    console = out()
    more = ("PROJECT", "USER", "PRIO", "CPU", "MEMORY") if wide else ()
    rows = table(
        "ID", "NAME", "STATUS", "GPU", *more, "TIME", "NODE, OR WHY", right=("GPU", "TIME", "PRIO", "CPU"), wrap=("NODE, OR WHY",)
    )
    rows.columns[1].max_width = 16 if console.width < 100 else 40
    for task in found:
        asked = task.requested
        extra = [
            clean(task.project),
            clean(task.user),
            str(task.priority),
            show_milli(asked.cpu_milli),
            size(asked.memory_bytes),
        ]
        shown = [Text(text) for text in (extra if wide else [])]
        time_ms = task.waited_ms if task.status in ("queued", "allocated") else task.ran_ms
        rows.add_row(task.id, Text(_name(task)), status(task.status), gpus(asked), *shown, short(time_ms), _where_or_why(task))
    print_or_say(
        console, rows, "No tasks match." if any((statuses, project, by, name, group, service, labels)) else "No tasks yet."
    )
    if len(found) == limit:
        note(f"The newest {limit}; --limit shows more.")


def _name(task: TaskView) -> str:
    """With its index, where it is of an array."""
    return clean(task.name) if task.array_index is None else f"{clean(task.name)}[{task.array_index}]"


def _where_or_why(task: TaskView) -> Text:
    """The node; for a waiting or failed task the reason's code, which `crater show` spells out."""
    if task.cancelling:
        return Text("stopping", style="magenta")
    reason = task.reason.code.replace("_", " ") if task.reason is not None else ""
    if task.status == "queued":
        return Text(reason or NOTHING, style="yellow")
    if task.status in ("failed", "refused"):
        return Text(f"exit code {task.exit_code}" if reason == "exit code" else reason, style="red")
    return Text(clean(task.node or NOTHING))


def show(task_id: TaskId, as_json: Json = False) -> None:
    """Show a task (or an array): how it stands and why, what it asked for and got, and its story so far."""
    if is_array(task_id):
        show_array(task_id, as_json)
        return
    with client() as crater:
        task = crater.task(task_id)
        if as_json:
            print_json(task)
            return
        story = crater.events(task_id)
    console = out()
    console.print(Text.assemble((_name(task), "bold"), "  ", (task.id, "dim"), "  ", status(task.status)))
    why = reason_text(task.reason)
    if why is not None and (task.reason is None or task.reason.code != "finished"):
        console.print(Padding(why, (0, 0, 0, 2)))
    console.print()
    console.print(facts(_rows(task)))
    console.print()
    console.print(_story(story))


def _rows(task: TaskView) -> list[tuple[str, str | Group | None]]:
    devices = Group(*(Text(device_line(grant)) for grant in task.devices)) if task.devices else None
    peak = [f"{size(task.memory_peak_bytes)} memory"] if task.memory_peak_bytes else []
    peak += [f"{show_mib(task.gpu_memory_peak_mib)} GPU memory"] if task.gpu_memory_peak_mib else []
    busy = f"{show_mib(task.gpu_memory_mib)} of GPU memory, {task.gpu_percent_milli / 10:.3g} % of a GPU"
    computing = task.status == "running" and any(not grant.simulated for grant in task.devices)
    held = f"{task.gpu_hours:.4g} GPU-hours, {task.core_hours:.4g} core-hours, {task.gb_hours:.4g} GB-hours"
    return [
        ("project", f"{task.project}, user {task.user}, priority {task.priority}"),
        ("quota", task.quota_policy),
        ("service", task.service),
        ("group", task.group),
        ("command", " ".join(task.command)[:2000]),
        ("image", task.image),
        ("asked for", amounts_line(task.requested)),
        ("node", task.node if task.members == 1 else None),
        ("members", f"{task.members}: {', '.join(task.nodes) or 'not placed'}" if task.members > 1 else None),
        ("array", f"{task.array}, index {task.array_index}" if task.array else None),
        ("after", ", ".join(f"{after.task} ({after.when})" for after in task.after)),
        ("devices", devices),
        ("ports", ", ".join(str(port) for port in task.ports)),
        ("submitted", f"{moment(task.submitted_at_ms)} ({ago(task.submitted_at_ms)} ago)"),
        ("waited", short(task.waited_ms)),
        ("ran", short(task.ran_ms) if task.started_at_ms is not None else None),
        ("attempt", f"{task.attempt}" if task.attempt > 1 else None),
        ("exit code", str(task.exit_code) if task.exit_code is not None else None),
        ("peak", ", ".join(peak)),
        ("uses", busy if computing else None),
        ("held", held if task.started_at_ms is not None else None),
        ("labels", ", ".join(f"{name}={value}" for name, value in task.labels.items())),
    ]


def _story(events: list[EventView]) -> Group:
    lines: list[Text] = []
    for event in events:
        line = Text.assemble((f"{moment(event.at_ms)}  ", "dim"), status(event.what))
        if event.reason is not None and event.reason.code != "finished":
            line.append(f": {clean(event.reason.message)}")
        elif event.facts:
            line.append("  " + clean(", ".join(f"{name} {value}" for name, value in event.facts.items())), style="dim")
        lines.append(line)
    return Group(*lines)


def explain(task_id: TaskId, as_json: Json = False) -> None:
    """Explain a waiting task: the reason with its numbers, what can be done, and every node's score or rejection."""
    with client() as crater:
        explanation = crater.explain(task_id)
    if as_json:
        print_json(explanation)
        return
    print_explanation(explanation)


def print_explanation(found: ExplanationView) -> None:
    console = out()
    place = f", place {found.position} in the queue" if found.position else ""
    console.print(Text.assemble((found.task, "bold"), "  ", status(found.status), f"{place}, strategy {clean(found.strategy)}"))
    why = reason_text(found.reason)
    if why is not None:
        console.print(Padding(why, (0, 0, 0, 2)))
    if found.expected_start_ms is not None:
        about = "" if found.expected_sure else "about "
        console.print(Padding(f"expected to start {about}{moment(found.expected_start_ms)}", (0, 0, 0, 2)))
    elif found.expected_note:
        console.print(Padding(clean(f"expected start unknown: {found.expected_note}"), (0, 0, 0, 2)))
    if found.candidates:
        console.print()
        rows = table("NODE", "SCORE", "VERDICT", right=("SCORE",), wrap=("VERDICT",))
        for one in found.candidates:
            verdict = Text(clean(one.rejection.message)) if one.rejection else Text("could run it", style="green")
            rows.add_row(Text(clean(one.node)), f"{one.score:.3f}" if one.score is not None else NOTHING, verdict)
        console.print(rows)


def wait(
    task_ids: Annotated[list[str], typer.Argument(metavar="TASK...", show_default=False)],
    timeout: Annotated[str | None, option("TIME", "Give up after 30s, 10m, 2h; exit code 1.")] = None,
    as_json: Json = False,
) -> None:
    """Wait for tasks and arrays to end. Exit code 0 when all succeeded, else 1."""
    limit_s, clock = None if timeout is None else duration_ms(timeout, "timeout") / 1000, SystemClock()
    until_ms = None if limit_s is None else clock.monotonic_ms() + limit_s * 1000
    ended: list[TaskView | ArrayView] = []
    with client(patient=True) as crater:
        try:
            for task_id in task_ids:
                left_s = None if until_ms is None else max(0.0, (until_ms - clock.monotonic_ms()) / 1000)
                one = wait_for(crater, task_id, left_s) if is_array(task_id) else crater.wait(task_id, left_s)
                ended.append(one)
                if not as_json:
                    err().print(how(one))
        except KeyboardInterrupt:
            detached(task_ids[len(ended)])
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(ended)
    if not all(well(one) for one in ended):
        raise typer.Exit(FAILED)


def cancel(
    task_ids: Annotated[Many, typer.Argument(metavar="TASK...", show_default=False)] = None,
    group: Annotated[str | None, option("NAME", "Every live task of this group.")] = None,
    reason: Annotated[str, option("TEXT", "Why, for whoever looks at it later.", show_default=False)] = "",
    as_json: Json = False,
) -> None:
    """End tasks: SIGTERM, then SIGKILL after their grace time. Ending an ended task changes nothing.

    [bold]crater cancel t01m8rw21pc1579c61q[/]

    [bold]crater cancel --group nightly --reason "wrong data"[/]
    """
    if bool(task_ids) == bool(group):
        raise InvalidRequest("give the tasks to cancel, or --group")
    done: list[TaskView | ArrayView] = []
    failure: CraterError | None = None
    with client() as crater:
        if group:
            done += crater.cancel_group(group, reason)
        for task_id in task_ids or ():
            try:
                done.append(crater.cancel_array(task_id, reason) if is_array(task_id) else crater.cancel(task_id, reason))
            except CraterError as error:
                if failure is not None:
                    err().print(f"crater: {failure.message}", style="red")
                failure = error
    if as_json:
        print_json(done)
    for task in () if as_json else done:
        err().print(how(task))
    if group and not done and not as_json:
        note(f"No task of group {clean(group)} waits or runs.")
    if failure is not None:
        raise failure


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InvalidRequest(f"--label must be KEY=VALUE, found {text!r}", field="label")
    return name, value


def register(app: typer.Typer) -> None:
    for name, function in (("list", list_tasks), ("show", show), ("explain", explain), ("wait", wait), ("cancel", cancel)):
        app.command(name, rich_help_panel="Tasks")(function)
