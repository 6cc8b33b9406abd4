"""`crater services`: deployed, scaled, shown, removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from crater_core.cli.session import INTERRUPTED, Json, client, err, note, option, out, print_json
from crater_core.cli.show import NOTHING, ago, clean, facts, print_or_say, status, table
from crater_core.cli.submit import read_task_file

if TYPE_CHECKING:
    from crater_core.client import CraterClient
    from crater_core.wire.services import ServiceView

ServiceName = Annotated[str, typer.Argument(metavar="SERVICE", show_default=False)]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until every replica is ready; exit 1 when that takes too long.")]
Timeout = Annotated[float, option("SECONDS", "Seconds to wait.", min=0)]
services_app = typer.Typer(help="Services: tasks with replicas, a port and a health path.", rich_markup_mode="rich")


@services_app.callback(invoke_without_command=True)
def services(context: typer.Context, as_json: Json = False) -> None:
    """Services: tasks with replicas, a port and a health path.

    [bold]crater services deploy -f digits.yaml --wait[/]

    [bold]crater services scale digits 4[/]
    """
    if context.invoked_subcommand is None:
        list_services(as_json)


@services_app.command("list")
def list_services(as_json: Json = False) -> None:
    """List the services."""
    with client() as crater:
        found = crater.services()
    if as_json:
        print_json(found)
        return
    rows = table(
        "SERVICE", "STATUS", "READY", "CPU", "VERSION", "PROJECT", "CHANGED", right=("READY", "CPU", "VERSION"), wrap=("PROJECT",)
    )
    for one in found:
        rows.add_row(
            Text(clean(one.name)),
            status(one.status),
            _ready(one),
            _cpu(one.cpu_percent),
            str(one.generation),
            Text(clean(one.project)),
            f"{ago(one.changed_at_ms)} ago",
        )
    print_or_say(out(), rows, "No services. `crater services deploy -f service.yaml` makes one.")


def _ready(one: ServiceView) -> Text:
    return Text(f"{one.ready} of {one.replicas}", style="green" if one.ready >= one.replicas else "yellow")


def _cpu(percent: float | None) -> str:
    return NOTHING if percent is None else f"{percent:.0f} %"


@services_app.command("show")
def show_service(name: ServiceName, as_json: Json = False) -> None:
    """Show a service and its replicas: where each answers, or what holds it up."""
    with client() as crater:
        found = crater.service(name)
    if as_json:
        print_json(found)
        return
    _print_service(found)


def _print_service(found: ServiceView) -> None:
    console = out()
    console.print(Text.assemble((clean(found.name), "bold"), "  ", status(found.status), "  ", _ready(found), " replicas ready"))
    console.print()
    console.print(
        facts(
            [
                ("project", f"{found.project}, user {found.user}"),
                ("quota", found.quota_policy),
                ("health", found.health_path),
                (
                    "version",
                    f"{found.generation}, deployed {ago(found.created_at_ms)} ago, changed {ago(found.changed_at_ms)} ago",
                ),
                ("cpu", _cpu(found.cpu_percent) if found.cpu_percent is not None else None),
            ]
        )
    )
    if found.replica_list:
        console.print()
        rows = table("REPLICA", "STATUS", "CPU", "NODE", "ADDRESS, OR WHY", right=("CPU",), wrap=("ADDRESS, OR WHY",))
        for replica in found.replica_list:
            word = "ready" if replica.ready else replica.status
            held_up = clean(replica.reason.message) if replica.reason and not replica.ready else ""
            cpu = _cpu(None if replica.cpu_percent_milli is None else replica.cpu_percent_milli / 10)
            rows.add_row(
                replica.task,
                status(word),
                cpu,
                Text(clean(replica.node or NOTHING)),
                Text(held_up or clean(replica.url or NOTHING)),
            )
        console.print(rows)


@services_app.command("deploy")
def deploy(
    file: Annotated[str, option("PATH", "The service in YAML; - reads standard input.", "--file", "-f", show_default=False)],
    wait: Wait = False,
    timeout: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Deploy a service, or roll it to a new version. The same file again changes nothing.

    A file holds [bold]name, command[/] (its {port} is replaced) or [bold]image, replicas, resources, health[/];
    docs/cli.md has one.
    """
    body = read_task_file(file)
    with client(patient=wait) as crater:
        found = crater.deploy(body)
        _finish(crater, found, wait, timeout, as_json)


@services_app.command("scale")
def scale(
    name: ServiceName,
    replicas: Annotated[int, typer.Argument(min=0, show_default=False)],
    reason: Annotated[str, option("TEXT", "Why, for whoever looks at it later.", show_default=False)] = "",
    wait: Wait = False,
    timeout: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """Set how many replicas a service has."""
    with client(patient=wait) as crater:
        found = crater.scale(name, replicas, reason)
        _finish(crater, found, wait, timeout, as_json)


def _finish(crater: CraterClient, found: ServiceView, wait: bool, timeout_s: float, as_json: bool) -> None:
    if wait:
        note(f"{clean(found.name)}: waiting for {found.replicas} replica(s)")
        try:
            found = crater.wait_service(found.name, timeout_s)
        except KeyboardInterrupt:
            err().print(f"\nDetached; the deployment goes on. `crater services show {clean(found.name)}` shows how far it is.")
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(found)
    elif wait:
        _print_service(found)
    else:
        note(f"{clean(found.name)} wants {found.replicas} replica(s), version {found.generation}; {found.ready} ready now.")


@services_app.command("remove")
def remove_service(name: ServiceName, as_json: Json = False) -> None:
    """Stop the replicas of a service and remove it."""
    with client() as crater:
        found = crater.remove_service(name)
    if as_json:
        print_json(found)
    else:
        note(f"{clean(name)} is being removed; {len(found.replica_list)} replica(s) stop.")


def register(app: typer.Typer) -> None:
    app.add_typer(services_app, name="services", rich_help_panel="Services")
