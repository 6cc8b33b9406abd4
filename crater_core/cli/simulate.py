"""`crater simulate`: what a trace would have been like on a cluster, under one policy or several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from crater_core.cli.session import Json, out, print_json
from crater_core.cli.show import table
from crater_core.errors import InvalidRequest

if TYPE_CHECKING:
    from crater_core.simulation import Fill, Outcome, Trace

HOUR_MS = 3_600_000


def simulate(
    trace: Annotated[Path, typer.Argument(help="Tasks as CSV: name,cpu_milli,memory_mib,num_gpu,gpu_milli or vc,arrival_s,...")],
    nodes: Annotated[Path | None, typer.Option(help="Nodes as CSV: sn,cpu_milli,memory_mib,gpu,model.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A strategy; give it again to compare. Else best_fit.")] = None,
    experiment: Annotated[
        Literal["replay", "fill"],
        typer.Option(help="replay: tasks come and end. fill: they stay, and what does not fit is dropped."),
    ] = "replay",
    passing: Annotated[
        Literal["backfill", "free", "none"], typer.Option(help="How later tasks may pass one that has no room.")
    ] = "backfill",
    known_ends: Annotated[bool, typer.Option(help="Give each task its true run time as its time limit.")] = True,
    gpus_per_node: Annotated[int, typer.Option(min=1, max=64, help="For traces that name no nodes.")] = 8,
    load: Annotated[float, typer.Option(min=0.01, max=10, help="For those: GPU time asked over GPU time there is.")] = 0.75,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="For fill: how many random orders to average over.")] = 1,
    as_json: Json = False,
) -> None:
    """Replay a trace through the scheduler's own decisions on a virtual clock.

    [bold]crater simulate openb_pod_list_default.csv --nodes openb_node_list_gpu_node.csv --experiment fill
    --policy best_fit --policy fragmentation_aware --seeds 5[/]

    [bold]crater simulate jobs.csv --load 0.75 --policy best_fit[/]
    """
    read = _read(trace, nodes, gpus_per_node, round(load * 1000))
    policies = policy or ["best_fit"]
    _check(policies)
    if experiment == "fill":
        _show_fills(read, policies, seeds, as_json)
    else:
        _show_replays(read, policies, passing, known_ends, as_json)


def _read(trace: Path, nodes: Path | None, gpus_per_node: int, load_milli: int) -> Trace:
    from crater_core.simulation import read_jobs, read_openb

    for path in (trace, nodes):
        if path is not None and not path.is_file():
            raise InvalidRequest(f"there is no file {path}", field="trace")
    if nodes is not None:
        return read_openb(nodes, trace)
    return read_jobs(trace, gpus_per_node=gpus_per_node, load_milli=load_milli)


def _check(policies: list[str]) -> None:
    from crater_core.scheduling import STRATEGIES

    unknown = [name for name in policies if name not in STRATEGIES]
    if unknown:
        raise InvalidRequest(f"no strategy is called {unknown[0]}; there are {', '.join(STRATEGIES)}", field="policy")


def _show_fills(trace: Trace, policies: list[str], seeds: int, as_json: bool) -> None:
    from crater_core.simulation import fill

    results = [[fill(trace, policy, 42 + seed) for seed in range(seeds)] for policy in policies]
    if as_json:
        print_json({"trace": trace.name, "experiment": "fill", "policies": [_fill_facts(runs) for runs in results]})
        return
    shown = table("POLICY", "PLACED", "HELD AT 90%", "AT 100%", "AT 130%", right=("PLACED", "HELD AT 90%", "AT 100%", "AT 130%"))
    for runs in results:
        facts = _fill_facts(runs)
        shown.add_row(
            Text(facts["policy"]), str(facts["placed"]), *(_percent(facts["held_percent"].get(at)) for at in (90, 100, 130))
        )
    out().print(shown)


def _fill_facts(runs: list[Fill]) -> dict[str, Any]:
    held = {
        at: _mean([run.ratio_percent[at] for run in runs]) for at in (80, 90, 100, 110, 120, 130) if at in runs[0].ratio_percent
    }
    return {
        "policy": runs[0].strategy,
        "seeds": [run.seed for run in runs],
        "placed": round(_mean([run.placed for run in runs])),
        "held_percent": held,
    }


def _show_replays(trace: Trace, policies: list[str], passing: str, known_ends: bool, as_json: bool) -> None:
    from crater_core.model.snapshot import Settings
    from crater_core.simulation import simulate as replay
    from crater_core.simulation import with_known_ends

    played = with_known_ends(trace) if known_ends else trace
    results = [replay(played, Settings(strategy=policy, passing=passing)) for policy in policies]
    if as_json:
        print_json({"trace": trace.name, "experiment": "replay", "policies": [_replay_facts(result) for result in results]})
        return
    right = ("TASKS", "GPU USE", "MEAN WAIT", "P50", "P95", "PREEMPTED", "FAIRNESS")
    shown = table("POLICY", *right, right=right)
    for result in results:
        facts = _replay_facts(result)
        shown.add_row(
            Text(facts["policy"]),
            str(facts["tasks"]),
            _percent(100 * facts["utilisation"]),
            *(f"{facts[name] / HOUR_MS:,.2f} h" for name in ("mean_wait_ms", "p50_wait_ms", "p95_wait_ms")),
            str(facts["preemptions"]),
            f"{facts['fairness']:.2f}",
        )
    out().print(shown)


def _replay_facts(result: Outcome) -> dict[str, Any]:
    return {
        "policy": result.strategy,
        "tasks": result.tasks,
        "refused": result.refused,
        "finished": result.finished,
        "utilisation": round(result.utilisation, 4),
        "mean_wait_ms": round(result.mean_wait_ms),
        "p50_wait_ms": result.percentile_wait_ms(50),
        "p95_wait_ms": result.percentile_wait_ms(95),
        "preemptions": result.preemptions,
        "lost_work_ms": result.lost_work_ms,
        "fairness": round(result.fairness, 4),
        "span_ms": result.span_ms,
    }


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} %"


def register(app: typer.Typer) -> None:
    app.command("simulate", rich_help_panel="Cluster")(simulate)
