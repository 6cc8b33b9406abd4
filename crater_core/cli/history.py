"""`crater history export`: the cluster's own past as a trace that `crater simulate` replays."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from crater_core.cli.session import client, note, option
from crater_core.errors import InvalidRequest
from crater_core.model.resources import names_slice
from crater_core.model.units import MILLI

if TYPE_CHECKING:
    from crater_core.wire.nodes import NodeView
    from crater_core.wire.tasks import TaskView

ENDED = ("succeeded", "failed", "cancelled")
MIB = 1024**2
history = typer.Typer(no_args_is_help=True, help="The cluster's own past.")


@history.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="Where to write: a name that ends with .csv or .parquet.")],
    nodes: Annotated[Path | None, option("FILE", "Also write the machines, as CSV for `crater simulate --nodes`.")] = None,
    project: Annotated[str | None, option("NAME", "Tasks of this project only.")] = None,
    limit: Annotated[int | None, option("COUNT", "The newest so many tasks only.", min=1)] = None,
) -> None:
    """Write the tasks that have ended, with what they asked for and their times, as a trace.

    [bold]crater history export history.csv --nodes nodes.csv && crater simulate history.csv --nodes nodes.csv[/]
    """
    if file.suffix not in (".csv", ".parquet"):
        raise InvalidRequest(f"{file}: the name must end with .csv or .parquet", field="file")
    with client() as crater:
        rows = [row_of(task) for task in crater.tasks(status=ENDED, project=project, limit=limit)]
        machines = [machine_of(node) for node in crater.nodes()] if nodes is not None else []
    if not rows:
        raise InvalidRequest("no task has ended yet: there is nothing to export", field="file")
    _write(file, rows)
    note(f"{len(rows)} task(s) written: {file}")
    if nodes is not None and machines:
        _write(nodes, machines)
        note(f"{len(machines)} node(s) written: {nodes}")


def row_of(task: TaskView) -> dict[str, Any]:
    """One line of a trace; amounts are those of one member."""
    members, asked = max(1, task.members_asked), task.requested
    count = task.gpu_count
    return {
        "task": task.id,
        "name": task.name,
        "project": task.project,
        "user": task.user,
        "submitted_at_ms": task.submitted_at_ms,
        "ran_ms": task.ran_ms,
        "cpu_milli": asked.cpu_milli // members,
        "memory_bytes": asked.memory_bytes // members,
        "type": task.type,
        "priority": task.priority,
        "members": members,
        "disk_bytes": asked.disk_bytes // members,
        "gpu_count": count,
        "gpu_milli": asked.gpu_milli // members // count if count else 0,
        "gpu_memory_mib": 0 if task.gpu_exclusive or not count else asked.gpu_memory_mib // members // count,
        # A MIG slice is replayed as a share of a card, as large as it is.
        "gpu_types": "|".join(name for name in task.gpu_types if not names_slice(name)),
        "quota_policy": task.quota_policy or "",
        "checkpoint_every_ms": "" if task.checkpoint_every_ms is None else task.checkpoint_every_ms,
        "time_limit_ms": "" if task.time_limit_ms is None else task.time_limit_ms,
        "started_at_ms": "" if task.started_at_ms is None else task.started_at_ms,
        "ended_at_ms": "" if task.ended_at_ms is None else task.ended_at_ms,
        "status": task.status,
        "exit_code": "" if task.exit_code is None else task.exit_code,
        "preemptions": task.preemptions,
        "node": task.node or "",
    }


def machine_of(node: NodeView) -> dict[str, Any]:
    devices = node.devices
    cards = -(-sum(device.card_milli for device in devices) // MILLI)
    return {
        "sn": node.name,
        "cpu_milli": node.allocatable.cpu_milli,
        "memory_mib": node.allocatable.memory_bytes // MIB,
        "gpu": cards,
        "model": devices[0].gpu_type if devices else "",
        "gpu_memory_mib": sum(device.memory_mib for device in devices) // cards if cards else 0,
        "disk_bytes": node.allocatable.disk_bytes,
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    try:
        if path.suffix == ".parquet":
            _write_parquet(path, rows)
            return
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}", field="file") from None


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    from crater_core.simulation.rows import plots_missing

    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise plots_missing("writing Parquet") from None
    arrow: Any = pyarrow
    whole: Any = parquet
    tidy = [{name: None if value == "" else value for name, value in row.items()} for row in rows]
    whole.write_table(arrow.Table.from_pylist(tidy), path)


def register(app: typer.Typer) -> None:
    app.add_typer(history, name="history", rich_help_panel="Cluster")
