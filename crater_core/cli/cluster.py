"""`crater nodes, pools, health`: the machines and what they give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from crater_core.cli.doctor import doctor
from crater_core.cli.session import FAILED, Json, client, note, option, out, print_json
from crater_core.cli.show import NOTHING, ago, clean, facts, now_ms, print_or_say, share, short, size, size_of, status, table
from crater_core.model.node import SharingMode
from crater_core.model.units import show_mib, show_milli

if TYPE_CHECKING:
    from crater_core.wire.nodes import DeviceView, NodeView, PoolView
    from crater_core.wire.usage import Health

NodeName = Annotated[str, typer.Argument(metavar="NODE", show_default=False)]
nodes_app = typer.Typer(help="The machines: what is on them, what is free, whether they take tasks.", rich_markup_mode="rich")


@nodes_app.callback(invoke_without_command=True)
def nodes(context: typer.Context, as_json: Json = False) -> None:
    """The machines: what is on them, what is free, whether they take tasks.

    [bold]crater nodes[/]  [dim]all of them[/]

    [bold]crater nodes show gpu-node-01[/]

    [bold]crater nodes cordon gpu-node-01[/]  [dim]take nothing new; what runs goes on[/]

    [bold]crater nodes drain gpu-node-01 --deadline 2h --reason "new driver"[/]  [dim]also empty it[/]
    """
    if context.invoked_subcommand is None:
        list_nodes(as_json)


@nodes_app.command("list")
def list_nodes(as_json: Json = False) -> None:
    """List the nodes with what is free on each."""
    with client() as crater:
        found = crater.nodes()
    if as_json:
        print_json(found)
        return
    rows = table(
        "NODE", "STATUS", "TASKS", "GPU FREE", "CPU FREE", "MEMORY FREE", "SEEN", right=("TASKS", "SEEN"), wrap=("NODE",)
    )
    for node in found:
        rows.add_row(
            Text(clean(node.name)),
            _node_status(node),
            str(node.allocations),
            _gpus_free(node),
            f"{show_milli(node.free.cpu_milli)} of {show_milli(node.allocatable.cpu_milli)}",
            size_of(node.free.memory_bytes, node.allocatable.memory_bytes),
            short(node.heartbeat_age_ms),
        )
    print_or_say(out(), rows, "No nodes yet: start crater-agent on one, with this scheduler as its scheduler_endpoint.")


def _node_status(node: NodeView) -> Text:
    if node.status != "ready" or not node.cordoned:
        return status(node.status)
    return status("cordoned" if node.drain is None else "draining" if node.allocations else "drained")


def _drain_line(node: NodeView) -> str | None:
    if node.drain is None:
        return None
    until = f", what is left is moved in {short(node.drain.deadline_ms - now_ms())}" if node.drain.deadline_ms else ""
    why = f": {node.drain.reason}" if node.drain.reason else ""
    return f"by {node.drain.by} {ago(node.drain.since_ms)} ago{why}{until}"


def _gpus_free(node: NodeView) -> str:
    if not node.devices:
        return NOTHING
    free_milli = sum(1000 - device.used_compute_milli for device in node.devices if device.healthy)
    simulated = " sim" if all(device.simulated for device in node.devices) else ""
    return f"{show_milli(free_milli)} of {len(node.devices)}{simulated}"


@nodes_app.command("show")
def show_node(name: NodeName, as_json: Json = False) -> None:
    """Show a node: its devices, its labels, and what its agent found odd."""
    with client() as crater:
        node = crater.node(name)
    if as_json:
        print_json(node)
        return
    console = out()
    console.print(Text.assemble((clean(node.name), "bold"), "  ", _node_status(node)))
    console.print()
    all_, free = node.allocatable, node.free
    cores = f"{show_milli(free.cpu_milli)} of {show_milli(all_.cpu_milli)}"
    used = [
        ("cpu", all_.cpu_milli, free.cpu_milli, cores),
        ("memory", all_.memory_bytes, free.memory_bytes, size_of(free.memory_bytes, all_.memory_bytes)),
        ("disk", all_.disk_bytes, free.disk_bytes, size_of(free.disk_bytes, all_.disk_bytes)),
    ]
    console.print(
        facts(
            [
                *(
                    (what, Text.assemble(share(whole - left, whole), f"  {text} free"))
                    for what, whole, left, text in used
                    if whole
                ),
                ("drain", _drain_line(node)),
                ("labels", ", ".join(f"{key}={value}" for key, value in node.labels.items())),
                ("pools", ", ".join(f"{pool} ({kind})" for pool, kind in node.pools.items())),
                ("limits", f"{node.enforcement}; runs {', '.join(node.runtimes)} tasks"),
                ("run workers", f"{node.control_used} of {node.control_slots} control slots"),
                ("address", node.address),
                ("heartbeat", f"{short(node.heartbeat_age_ms)} ago; registered {ago(node.registered_at_ms)} ago"),
                ("agent", node.agent_version),
                ("notes", Group(*(Text(clean(text), style="yellow") for text in node.notes)) if node.notes else None),
            ]
        )
    )
    if node.devices:
        console.print()
        rows = table("GPU", "TYPE", "MEMORY", "POOL", "MODE", "GIVEN OUT", "UUID", wrap=("UUID", "TYPE"))
        for device in node.devices:
            rows.add_row(*_device_row(device))
        console.print(rows)
        for device in node.devices:
            if device.unwell:
                console.print(Text(f"GPU {device.index} is in quarantine: {clean(device.unwell)}", style="yellow"))


def _device_row(device: DeviceView) -> list[str | Text]:
    state = Text("unhealthy", style="red") if not device.healthy else share(device.used_compute_milli, 1000, 6)
    profile = f" {device.model.rpartition(' ')[2].lower()}" if device.sharing == SharingMode.MIG else ""
    kind = (device.gpu_type or device.model) + profile + (" (sim)" if device.simulated else "")
    return [
        str(device.index),
        Text(clean(kind)),
        show_mib(device.memory_mib),
        Text(clean(device.pool)),
        device.sharing,
        state,
        device.uuid,
    ]


@nodes_app.command("cordon")
def cordon(name: NodeName, as_json: Json = False) -> None:
    """Let a node take nothing new; what runs there goes on."""
    with client() as crater:
        node = crater.cordon(name)
    if as_json:
        print_json(node)
    else:
        running = f"; {node.allocations} task(s) go on there" if node.allocations else ""
        note(f"{clean(name)} takes nothing new{running}. `crater nodes uncordon {clean(name)}` opens it again.")


@nodes_app.command("drain")
def drain(
    name: NodeName,
    deadline: Annotated[
        str | None, option("TIME", "After so long, stop what still runs and queue it again (10m, 2h). Without: let it end.")
    ] = None,
    reason: Annotated[str, option("TEXT", "Why, for those who ask.")] = "",
    as_json: Json = False,
) -> None:
    """Empty a node: nothing new starts, replicas move first, tasks run to their end or to the deadline."""
    with client() as crater:
        node = crater.drain(name, deadline, reason)
    if as_json:
        print_json(node)
    else:
        left = f"{node.allocations} task(s) are still there" if node.allocations else "it is empty"
        note(f"{clean(name)} is being drained; {left}. `crater nodes undrain {clean(name)}` opens it again.")


@nodes_app.command("undrain")
@nodes_app.command("uncordon")
def uncordon(name: NodeName, as_json: Json = False) -> None:
    """Let a node take tasks again, cordoned or drained."""
    with client() as crater:
        node = crater.uncordon(name)
    if as_json:
        print_json(node)
    else:
        note(f"{clean(name)} takes tasks again.")


def pools(as_json: Json = False) -> None:
    """List the pools, gathered over their nodes, with what is free in each."""
    with client() as crater:
        found = crater.pools()
    if as_json:
        print_json(found)
        return
    rows = table("POOL", "KIND", "NODES", "STRATEGY", "TAKEN", "FREE", right=("NODES",), wrap=("POOL",))
    for pool in found:
        used, whole, free = _pool_amounts(pool)
        rows.add_row(Text(clean(pool.name)), pool.kind, str(len(pool.nodes)), pool.strategy, share(used, whole), free)
    print_or_say(out(), rows, "No pools yet: an agent declares them in its agent.yaml, under resource_pools.")


def _pool_amounts(pool: PoolView) -> tuple[int, int, str]:
    """(taken, all, what is free in words)."""
    say = {"gpu": show_milli, "cpu": show_milli, "memory": size, "disk": size}[pool.kind]
    field = {"gpu": "gpu_milli", "cpu": "cpu_milli", "memory": "memory_bytes", "disk": "disk_bytes"}[pool.kind]
    whole: int = getattr(pool.capacity, field)
    free: int = getattr(pool.free, field)
    untouched = f" ({pool.devices_free} whole)" if pool.kind == "gpu" and pool.devices else ""
    return whole - free, whole, (size_of(free, whole) if say is size else f"{say(free)} of {say(whole)}") + untouched


def health(as_json: Json = False) -> None:
    """Ask the scheduler how it is. Exit code 1 when it is not well, 5 when it cannot be reached."""
    with client() as crater:
        found = crater.health()
        asked = crater.endpoints
    if as_json:
        print_json(found)
    else:
        _print_health(found, asked)
    if found.status != "ok":
        raise typer.Exit(FAILED)


def _print_health(found: Health, asked: tuple[str, ...]) -> None:
    word = Text("well", style="green") if found.status == "ok" else Text(found.status.replace("_", " "), style="red")
    console = out()
    console.print(Text.assemble(("scheduler ", "bold"), word, (f"  {', '.join(asked)}", "dim")))
    console.print()
    console.print(
        facts(
            [
                ("version", found.version),
                ("leader", f"{'yes' if found.leader else 'no'}, term {found.term}, revision {found.revision}"),
                ("nodes", f"{found.nodes_ready} ready"),
                ("tasks", f"{found.tasks_queued} waiting, {found.tasks_running} running"),
            ]
        )
    )


def register(app: typer.Typer) -> None:
    app.add_typer(nodes_app, name="nodes", rich_help_panel="Cluster")
    app.add_typer(nodes_app, name="node", hidden=True)
    app.command("pools", rich_help_panel="Cluster")(pools)
    app.command("health", rich_help_panel="Cluster")(health)
    app.command("doctor", rich_help_panel="Cluster")(doctor)
