"""Task arrays on the command line: `submit --array`, and what `show`, `wait` and `cancel` say of an array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich.padding import Padding
from rich.text import Text

from crater_core.cli.session import FAILED, INTERRUPTED, client, err, note, out, print_json
from crater_core.cli.show import ago, clean, facts, moment, outcome_line, reason_text, status
from crater_core.errors import InvalidRequest
from crater_core.model.task import ARRAY_PREFIX

if TYPE_CHECKING:
    from crater_core.client import CraterClient
    from crater_core.wire.arrays import ArrayView
    from crater_core.wire.tasks import TaskView

BAD = ("failed", "cancelled", "refused")
SHOWN_MAX = 20


def is_array(id: str) -> bool:
    return id.startswith(ARRAY_PREFIX)


def read_array(text: str) -> tuple[str, int | None]:
    """Indices and how many may run at once, from "0-99" or "0-99%10" as Slurm's users write it."""
    indices, percent, limit = text.partition("%")
    if percent and not (limit.isascii() and limit.isdigit() and int(limit[:6]) > 0):
        raise InvalidRequest(f"--array: after % stands how many may run at once, found {limit!r}", field="array")
    return indices, int(limit) if percent else None


def submit_array(body: dict[str, Any], text: str, key: str | None, *, wait: bool, as_json: bool) -> None:
    indices, running_max = read_array(text)
    with client(patient=wait) as crater:
        array = crater.submit_array(body, indices, running_max=running_max, idempotency_key=key)
        if wait:
            note(f"{array.id} ({array.name})")
            array = wait_for(crater, array.id, None)
    if as_json:
        print_json(array)
    elif not wait:
        out().print(array.id)
    if wait:
        end(array, as_json)


def wait_for(crater: CraterClient, array: str, timeout_s: float | None) -> ArrayView:
    try:
        return crater.wait_array(array, timeout_s)
    except KeyboardInterrupt:
        err().print(f"\nDetached; the array goes on. `crater show {array}` shows it, `crater cancel {array}` ends it.")
        raise typer.Exit(INTERRUPTED) from None


def end(array: ArrayView, as_json: bool) -> None:
    """Say how it ended. Raises typer.Exit unless all of it succeeded."""
    if not as_json:
        err().print(how(array))
    if not well(array):
        raise typer.Exit(FAILED)


def well(one: TaskView | ArrayView) -> bool:
    """Whether it, or all of it, succeeded."""
    from crater_core.wire.arrays import ArrayView

    if isinstance(one, ArrayView):
        return one.counts.get("succeeded", 0) == one.size
    return one.status == "succeeded"


def how(one: TaskView | ArrayView) -> Text:
    """How it stands, in one line."""
    from crater_core.wire.arrays import ArrayView

    if isinstance(one, ArrayView):
        return Text.assemble(f"{one.id} ", counts(one))
    return Text.assemble(f"{one.id} ", ("stopping", "magenta")) if one.cancelling else outcome_line(one)


def counts(array: ArrayView) -> Text:
    parts = [Text.assemble(f"{count} ", status(word)) for word, count in sorted(array.counts.items()) if count]
    return Text(", ").join(parts)


def show_array(array_id: str, as_json: bool) -> None:
    """The array as a whole, and the first of its tasks that did not end well."""
    with client() as crater:
        array = crater.array(array_id)
        if as_json:
            print_json(array)
            return
        bad = list(crater.tasks(array=array_id, status=BAD, limit=SHOWN_MAX)) if any(array.counts.get(b) for b in BAD) else []
    console = out()
    console.print(Text.assemble((clean(array.name), "bold"), "  ", (array.id, "dim"), "  ", counts(array)))
    why = reason_text(array.reason)
    if why is not None:
        console.print(Padding(why, (0, 0, 0, 2)))
    console.print()
    limit = f", {array.running_max} at once" if array.running_max is not None else ""
    console.print(
        facts(
            [
                ("project", f"{array.project}, user {array.user}"),
                ("tasks", f"{array.size}{limit}"),
                ("submitted", f"{moment(array.submitted_at_ms)} ({ago(array.submitted_at_ms)} ago)"),
            ]
        )
    )
    for task in bad:
        message = task.reason.message if task.reason is not None else ""
        which = f"[{task.array_index}] {task.id} "
        console.print(Text.assemble((which, "dim"), status(task.status), f": {clean(message)}"))
    if len(bad) == SHOWN_MAX:
        note(f"The newest {SHOWN_MAX} that did not end well; `crater list --array {array_id}` lists all.")
