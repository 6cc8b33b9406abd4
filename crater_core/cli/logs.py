"""`crater logs`: a task's output, as bytes, to the stream it was written to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from crater_core.cli.session import INTERRUPTED, client, err, print_json
from crater_core.cli.show import outcome_line
from crater_core.cli.submit import detached
from crater_core.cli.tasks import TaskId
from crater_core.errors import InvalidRequest

if TYPE_CHECKING:
    from crater_core.client import CraterClient
    from crater_core.client.flows import Stream
    from crater_core.wire.tasks import TaskView

Which = Literal["stdout", "stderr", "both"]


def logs(
    task_id: TaskId,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task has ended.")] = False,
    stream: Annotated[Which, typer.Option(help="Which of the two.")] = "both",
    member: Annotated[int, typer.Option(min=0, help="Which member of a gang.")] = 0,
    allocation: Annotated[str | None, typer.Option(help="Of an earlier attempt; `crater show --json` names the last.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print both as text in one JSON object.")] = False,
) -> None:
    """Print a task's output: what it wrote to stdout on stdout, and what it wrote to stderr on stderr.

    [bold]crater logs -f t01m8rw21pc1579c61q[/]  [dim]Ctrl-C stops looking, not the task[/]

    [bold]crater logs t01m8rw21pc1579c61q --stream stderr 2>&1 | tail[/]
    """
    if follow and (as_json or allocation):
        raise InvalidRequest("--follow shows the task as it goes; --json and --allocation do not go with it")
    wanted: tuple[Stream, ...] = ("stdout", "stderr") if stream == "both" else (stream,)
    with client(patient=follow) as crater:
        if follow:
            task = crater.task(task_id)
            try:
                follow_output(crater, task, wanted, member)
            except KeyboardInterrupt:
                detached(task_id)
                raise typer.Exit(INTERRUPTED) from None
            if not task.ended:
                err().print(outcome_line(crater.task(task_id)))
            return
        allocation = allocation or _allocation_of(crater, task_id, member)
        if as_json:
            texts = {one: b"".join(_pieces(crater, task_id, one, allocation)).decode("utf-8", "replace") for one in wanted}
            print_json({"task": task_id, **texts})
            return
        silent = True
        for one in wanted:
            for piece in _pieces(crater, task_id, one, allocation):
                write(one, piece)
                silent = False
        if silent:
            err().print(Text.assemble(("No output so far: ", "dim"), outcome_line(crater.task(task_id))))


def _allocation_of(crater: CraterClient, task_id: str, member: int) -> str | None:
    """None, which stands for the last attempt, where the first member is meant."""
    if member == 0:
        return None
    task = crater.task(task_id)
    found = task.allocation_of(member)
    if found is None:
        raise InvalidRequest(f"--member: the last attempt of {task_id} has {len(task.allocations)} member(s), counted from 0")
    return found


def follow_output(
    crater: CraterClient, task: TaskView, wanted: tuple[Stream, ...] = ("stdout", "stderr"), member: int = 0
) -> None:
    """Pass a task's output on as it comes, until it has ended."""
    for stream, data in crater.follow_logs(task.id, member):
        if stream in wanted:
            write(stream, data)


def write(stream: Stream, data: bytes) -> None:
    target = (sys.stdout if stream == "stdout" else sys.stderr).buffer
    target.write(data)
    target.flush()


def _pieces(crater: CraterClient, task_id: str, stream: Stream, allocation: str | None) -> Iterator[bytes]:
    offset = 0
    while True:
        chunk = crater.logs(task_id, stream, offset=offset, allocation=allocation)
        if not chunk.data:
            return
        yield chunk.data
        offset = chunk.next_offset


def register(app: typer.Typer) -> None:
    app.command("logs", rich_help_panel="Tasks")(logs)
