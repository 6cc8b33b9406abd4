"""`crater simulate`: what a trace would have been like on a cluster, under one policy or several side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from crater_core.cli.session import INTERRUPTED, Json, err, note, option, out, print_json
from crater_core.cli.show import clean, short, table
from crater_core.errors import InvalidRequest
from crater_core.model.units import parse_duration_ms

if TYPE_CHECKING:
    from crater_core.model.snapshot import Settings
    from crater_core.simulation import Fill, Outcome, Shape, Trace

Ends = Literal["known", "rounded", "foretold", "unknown"]
Progress = Callable[[int, int], object]
LARGE = 2_000
"""Tasks that a cycle of a replay looks at, at most."""


def simulate(
    trace: Annotated[Path, typer.Argument(help="Tasks: a public trace, or what `crater history export` wrote. CSV or Parquet.")],
    nodes: Annotated[
        str | None,
        option("FILE|COUNT", "Machines as CSV, or how many to make. Else as many as --load asks for."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        option("STRATEGY[,KEY=VALUE...]", "What decides; give it again to compare. Else best_fit."),
    ] = None,
    experiment: Annotated[
        Literal["replay", "fill"],
        typer.Option(help="replay: tasks come and end. fill: they stay, and what does not fit is dropped."),
    ] = "replay",
    passing: Annotated[
        Literal["backfill", "free", "none"], typer.Option(help="How later tasks may pass one that has no room.")
    ] = "backfill",
    ends: Annotated[
        Ends,
        typer.Option(
            help="What is known of run times: true limits; those rounded up by a quarter at most; what past tasks tell; nothing."
        ),
    ] = "rounded",
    checkpoint_every: Annotated[
        str | None, option("TIME", "Tasks save their work so often, and go on from there when stopped; 0s: when stopped.")
    ] = None,
    gpus_per_node: Annotated[int, option("COUNT", "Of nodes that are made.", min=0, max=64)] = 8,
    cores_per_node: Annotated[int, option("COUNT", "Of nodes that are made.", min=1, max=4096)] = 64,
    memory_per_node: Annotated[int, option("GIB", "Of nodes that are made.", min=1, max=65_536)] = 512,
    load: Annotated[float, typer.Option(min=0.01, max=10, help="For those: GPU time asked over GPU time there is.")] = 0.75,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="For fill: how many random orders to average over.")] = 1,
    plots: Annotated[Path | None, option("DIR", "Write plots (PNG) and tables (Parquet) there; needs the extra [plots].")] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace through the scheduler's own decisions on a virtual clock.

    [bold]crater simulate jobs.csv --load 0.75 --policy best_fit --policy best_fit,passing=none,partition=project[/]

    [bold]crater simulate openb_pod_list_default.csv --nodes openb_node_list_gpu_node.csv --experiment fill
    --policy best_fit --policy fragmentation_aware --seeds 5[/]

    [bold]crater simulate history.csv --nodes nodes.csv --plots plots[/]

    A policy's keys: passing=backfill|free|none, partition=project, short_first=NUMBER, hold_after=TIME, reservations=COUNT,
    preempt_min_run=TIME, reclaim_after=TIME. Ctrl-C shows what there is by then.
    """
    from crater_core.simulation import Shape

    if experiment == "fill" and plots is not None:
        raise InvalidRequest("--plots goes with replay; fill has one figure a policy", field="plots")
    chosen = [parse_policy(text, passing) for text in policy or ["best_fit"]]
    file, count = _nodes(nodes)
    shape = Shape(count, gpus_per_node, cores_per_node * 1000, memory_per_node * 1024**3, round(load * 1000))
    read = _read(trace, file, shape)
    if checkpoint_every is not None:
        from crater_core.simulation import with_checkpoints

        read = with_checkpoints(read, _duration_ms(checkpoint_every, "checkpoint_every"))
    if experiment == "fill":
        _show_fills(read, chosen, seeds, as_json)
    else:
        _show_replays(read, chosen, ends, plots, as_json)


@dataclass(frozen=True, slots=True)
class Policy:
    """One column of the comparison."""

    name: str
    settings: Settings
    partitioned: bool = False


def parse_policy(text: str, passing: str = "backfill") -> Policy:
    """`best_fit,passing=none,partition=project`. Raises InvalidRequest that names the key."""
    from crater_core.model.snapshot import Settings
    from crater_core.scheduling import STRATEGIES

    strategy, *pairs = text.split(",")
    if strategy not in STRATEGIES:
        raise InvalidRequest(f"no strategy is called {strategy}; there are {', '.join(STRATEGIES)}", field="policy")
    settings, partitioned = Settings(strategy=strategy, passing=passing, cycle_tasks_max=LARGE), False
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key == "partition" and value == "project":
            partitioned = True
        else:
            settings = _with(settings, key, value, pair)
    return Policy(text, settings, partitioned)


def _with(settings: Settings, key: str, value: str, pair: str) -> Settings:
    try:
        match key:
            case "passing" if value in ("backfill", "free", "none"):
                return replace(settings, passing=value)
            case "short_first":
                return replace(settings, short_first_milli=_at_least_0(round(float(value) * 1000)))
            case "hold_after":
                return replace(settings, hold_after_ms=parse_duration_ms(value, key))
            case "reclaim_after":
                return replace(settings, reclaim_after_ms=parse_duration_ms(value, key))
            case "preempt_min_run":
                return replace(settings, preempt_min_run_ms=parse_duration_ms(value, key))
            case "reservations":
                return replace(settings, reservations_max=_at_least_0(int(value)))
            case _:
                pass
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"--policy {pair}: {error}", field="policy") from None
    keys = "passing, partition, short_first, hold_after, reservations, preempt_min_run, reclaim_after"
    raise InvalidRequest(f"--policy {pair}: not a key with a value that it takes; keys are {keys}", field="policy")


def _duration_ms(text: str, field: str) -> int:
    try:
        return parse_duration_ms(text, field)
    except ValueError as error:
        raise InvalidRequest(str(error), field=field) from None


def _at_least_0(value: int) -> int:
    if value < 0:
        raise ValueError("a number must not be negative")
    return value


def _nodes(text: str | None) -> tuple[Path | None, int | None]:
    if text is None:
        return None, None
    if text.isdigit():
        if not 1 <= int(text) <= 1_000_000:
            raise InvalidRequest(f"--nodes must be between 1 and 1,000,000, found {text}", field="nodes")
        return None, int(text)
    return Path(text), None


def _read(trace: Path, nodes: Path | None, shape: Shape) -> Trace:
    from crater_core.simulation import read_trace

    for path, field in ((trace, "trace"), (nodes, "nodes")):
        if path is not None and not path.is_file():
            raise InvalidRequest(f"there is no file {path}", field=field)
    return read_trace(trace, nodes, shape)


@contextmanager
def _progress(of: str) -> Generator[Progress]:
    """A line on standard error, on terminals only."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import Progress as Bar

    with Bar(console=err(), transient=True) as bar:
        task = bar.add_task(clean(of))

        def told(done: int, total: int) -> None:
            if done % 50 == 0 or done == total:
                bar.update(task, completed=done, total=total)

        yield told


# --- fill


def _show_fills(trace: Trace, policies: list[Policy], seeds: int, as_json: bool) -> None:
    from crater_core.simulation import fill

    results: list[list[Fill]] = []
    interrupted = False
    with _progress("filling") as told:
        for policy in policies:
            runs: list[Fill] = []
            results.append(runs)
            for seed in range(seeds):
                try:
                    runs.append(fill(trace, policy.settings.strategy, 42 + seed))
                except KeyboardInterrupt:
                    interrupted = True
                    break
                told(sum(len(done) for done in results), seeds * len(policies))
            if interrupted:
                break
    results = [runs for runs in results if runs]
    if as_json:
        print_json({"trace": trace.name, "experiment": "fill", "policies": [_fill_facts(runs) for runs in results]})
    else:
        right = ("PLACED", "HELD AT 90%", "AT 100%", "AT 130%")
        shown = table("POLICY", *right, right=right)
        for runs in results:
            facts = _fill_facts(runs)
            held = (_percent(facts["held_percent"].get(at)) for at in (90, 100, 130))
            shown.add_row(Text(facts["policy"]), str(facts["placed"]), *held)
        out().print(shown)
    if interrupted:
        _stopped_early()


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


# --- replay


def _show_replays(trace: Trace, policies: list[Policy], ends: Ends, plots: Path | None, as_json: bool) -> None:
    from crater_core.simulation.figures import facts_of, write_plots

    results: list[Outcome] = []
    for policy in policies:
        with _progress(policy.name) as told:
            results.append(_replayed(trace, policy, ends, told))
        if results[-1].interrupted:
            break
    if as_json:
        facts = [facts_of(result) for result in results]
        print_json({"trace": trace.name, "experiment": "replay", "nodes": len(trace.nodes), "policies": facts})
    else:
        out().print(_replay_table(results))
    if plots is not None:
        for path in write_plots(plots, results):
            note(f"written: {path}")
    if results[-1].interrupted:
        _stopped_early()


def _replayed(trace: Trace, policy: Policy, ends: Ends, told: Progress) -> Outcome:
    from crater_core.simulation import simulate as replay
    from crater_core.simulation import simulate_partitions, with_known_ends

    played = with_known_ends(trace, exactly=ends == "known") if ends in ("known", "rounded") else trace
    settings = replace(policy.settings, foretell=ends == "foretold")
    if policy.partitioned:
        return simulate_partitions(played, settings, name=policy.name, progress=told)
    return replay(played, settings, name=policy.name, progress=told)


def _replay_table(results: list[Outcome]) -> Any:
    from crater_core.simulation.figures import facts_of

    right = ("TASKS", "HELD", "USED", "FRAGMENTED", "TO START", "MEAN WAIT", "P50", "P95", "PREEMPTED", "FAIRNESS")
    shown = table("POLICY", *right, right=right, wrap=("POLICY",))
    for result in results:
        facts = facts_of(result)
        shown.add_row(
            Text(clean(facts["policy"])),
            f"{facts['finished']}" + (f" (+{facts['refused']} refused)" if facts["refused"] else ""),
            *(_percent(100 * facts[name]) for name in ("allocation_ratio", "utilisation", "fragmentation")),
            *(short(facts[name]) for name in ("mean_until_start_ms", "mean_wait_ms", "p50_wait_ms", "p95_wait_ms")),
            str(facts["preemptions"]),
            f"{facts['fairness']:.2f}",
        )
    return shown


def _stopped_early() -> None:
    note("Stopped early: these are the figures up to there.")
    raise typer.Exit(INTERRUPTED)


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values)


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} %"


def register(app: typer.Typer) -> None:
    app.command("simulate", rich_help_panel="Cluster")(simulate)
