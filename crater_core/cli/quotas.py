"""`crater quotas`: policies, their limits, and who holds what."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from crater_core.cli.session import Json, client, note, option, out, print_json
from crater_core.cli.show import NOTHING, clean, print_or_say, size, table
from crater_core.errors import InvalidRequest
from crater_core.model.units import show_milli

if TYPE_CHECKING:
    from crater_core.wire.nodes import LimitsView, QuotaView
    from crater_core.wire.resources import AmountsView

PolicyName = Annotated[str, typer.Argument(metavar="POLICY", show_default=False)]
FIELDS: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("GPU", "gpu_milli", show_milli),
    ("CPU", "cpu_milli", show_milli),
    ("MEMORY", "memory_bytes", size),
    ("DISK", "disk_bytes", size),
)
quotas_app = typer.Typer(help="Quota policies: limits, and who holds what.", rich_markup_mode="rich")


@quotas_app.callback(invoke_without_command=True)
def quotas(context: typer.Context, as_json: Json = False) -> None:
    """Quota policies: limits, and who holds what.

    [bold]crater quotas[/]

    [bold]crater quotas set training-quota --gpu 4 --cpu 32 --memory 128GB --disk 1TB[/]
    """
    if context.invoked_subcommand is None:
        list_quotas(as_json)


@quotas_app.command("list")
def list_quotas(as_json: Json = False) -> None:
    """List the policies: what is held of each limit, in all and by each user."""
    with client() as crater:
        found = crater.quotas()
    if as_json:
        print_json(found)
        return
    headings = [heading for heading, _, _ in FIELDS]
    rows = table("POLICY", *headings, "FOR", right=headings, wrap=("FOR",))
    for policy in found:
        cells = [_cell(policy.used, policy.limits, field, say) for _, field, say in FIELDS]
        projects = ", ".join(policy.projects) or "by name"
        rows.add_row(Text(clean(policy.name), style="bold"), *cells, Text(clean(projects)))
        guaranteed = [_guaranteed(policy.guarantee, field, say) for _, field, say in FIELDS]
        if any(guaranteed):
            rows.add_row(Text("  guaranteed" + (", lent" if policy.lend else ""), style="dim"), *guaranteed, "")
        for user, held in sorted(policy.used_by_user.items()):
            rows.add_row(Text("  " + clean(user), style="dim"), *_user_cells(policy, held), "")
    print_or_say(out(), rows, "No quota policies: anybody may use all there is. `crater quotas set` makes one.")


def _cell(used: AmountsView, limits: LimitsView, field: str, say: Callable[[int], str]) -> Text:
    limit: int | None = getattr(limits, field)
    held: int = getattr(used, field)
    if limit is None:
        return Text(f"{say(held)}" if held else NOTHING, style="dim")
    full = "red" if held >= limit else "yellow" if held > 0.8 * limit else ""
    return Text.assemble((say(held) if held else "0", full), f" / {say(limit)}")


def _guaranteed(guarantee: LimitsView, field: str, say: Callable[[int], str]) -> Text:
    amount: int | None = getattr(guarantee, field)
    return Text(say(amount) if amount is not None else "", style="dim")


def _user_cells(policy: QuotaView, held: AmountsView) -> list[Text]:
    cells: list[Text] = []
    for _, field, say in FIELDS:
        amount: int = getattr(held, field)
        limit: int | None = getattr(policy.user_limits, field)
        shown = (say(amount) if amount else NOTHING) + (f" / {say(limit)}" if limit is not None else "")
        cells.append(Text(shown, style="dim"))
    return cells


@quotas_app.command("set")
def set_quota(
    name: PolicyName,
    gpu: Annotated[str | None, option("COUNT", "GPUs at one time.")] = None,
    cpu: Annotated[str | None, option("COUNT", "Cores.")] = None,
    memory: Annotated[str | None, option("SIZE", "128GB, 64GiB.")] = None,
    disk: Annotated[str | None, option("SIZE", "1TB.")] = None,
    user_gpu: Annotated[str | None, option("COUNT", "GPUs for one user.")] = None,
    user_cpu: Annotated[str | None, option("COUNT", "Cores for one user.")] = None,
    user_memory: Annotated[str | None, option("SIZE", "Memory for one user.")] = None,
    user_disk: Annotated[str | None, option("SIZE", "Disk for one user.")] = None,
    guarantee_gpu: Annotated[str | None, option("COUNT", "GPUs that others leave, or give back.")] = None,
    guarantee_cpu: Annotated[str | None, option("COUNT", "Likewise, cores.")] = None,
    guarantee_memory: Annotated[str | None, option("SIZE", "Likewise, memory.")] = None,
    guarantee_disk: Annotated[str | None, option("SIZE", "Likewise, disk.")] = None,
    lend: Annotated[bool, typer.Option("--lend", help="Others may use what is guaranteed, until it is wanted back.")] = False,
    project: Annotated[list[str] | None, option("NAME", "It holds for this project; several times.")] = None,
    as_json: Json = False,
) -> None:
    """Create a policy, or change one: it becomes what the flags say, and a limit not given is none.

    [bold]crater quotas set dev-quota --gpu 1 --cpu 8 --memory 32GB --disk 100GB --project sandbox[/]

    [bold]crater quotas set vision-quota --gpu 8 --guarantee-gpu 4 --lend --project vision[/]
    """
    limits = {"gpu": gpu, "cpu": cpu, "memory": memory, "disk": disk}
    user_limits = {"gpu": user_gpu, "cpu": user_cpu, "memory": user_memory, "disk": user_disk}
    guarantee = {"gpu": guarantee_gpu, "cpu": guarantee_cpu, "memory": guarantee_memory, "disk": guarantee_disk}
    given = {"limits": limits, "user_limits": user_limits, "guarantee": guarantee}
    body: dict[str, Any] = {
        name: {key: value for key, value in amounts.items() if value is not None} for name, amounts in given.items()
    }
    if not any(body.values()):
        raise InvalidRequest(
            "a policy needs a limit: --gpu, --cpu, --memory, --disk, or one for each user (--user-gpu ...), or a guarantee"
        )
    body |= {"projects": project or [], "lend": lend}
    with client() as crater:
        policy = crater.set_quota(name, body)
    if as_json:
        print_json(policy)
    else:
        limits_set = [
            f"{say(limit)} {heading}" if heading in ("GPU", "CPU") else f"{say(limit)} of {heading.lower()}"
            for heading, field, say in FIELDS
            if (limit := getattr(policy.limits, field)) is not None
        ]
        note(f"Policy {clean(name)}: {', '.join(limits_set) or 'no limit in all'}.")


@quotas_app.command("remove")
def remove_quota(name: PolicyName) -> None:
    """Remove a policy that no live task or service names."""
    with client() as crater:
        crater.remove_quota(name)
    note(f"Policy {clean(name)} is removed.")


def register(app: typer.Typer) -> None:
    app.add_typer(quotas_app, name="quotas", rich_help_panel="Cluster")
