"""Outcomes as plain facts, as plots (PNG) and as tables (Parquet). The last two need the extra [plots]."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crater_core.simulation.outcome import Outcome
from crater_core.simulation.rows import plots_missing

HOUR_MS = 3_600_000


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """Ratios from 0 to 1, times in milliseconds."""
    return {
        "policy": outcome.policy,
        "resource": outcome.resource,
        "tasks": outcome.tasks,
        "refused": outcome.refused,
        "finished": outcome.finished,
        "allocation_ratio": round(outcome.allocation_ratio, 4),
        "utilisation": round(outcome.utilisation, 4),
        "fragmentation": round(outcome.fragmentation, 4),
        "mean_wait_ms": round(outcome.mean_wait_ms),
        "mean_until_start_ms": round(outcome.mean_until_start_ms),
        "p50_wait_ms": outcome.percentile_wait_ms(50),
        "p95_wait_ms": outcome.percentile_wait_ms(95),
        "preemptions": outcome.preemptions,
        "lost_work_ms": outcome.lost_work_ms,
        "fairness": round(outcome.fairness, 4),
        "span_ms": outcome.span_ms,
        "interrupted": outcome.interrupted,
    }


def write_plots(directory: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """`allocation.png`, `waits.png`, `figures.png`, and `policies.parquet`, `tasks.parquet`, `timeline.parquet`."""
    pyplot, arrow, parquet = _libraries()
    directory.mkdir(parents=True, exist_ok=True)
    written = [
        _plotted(pyplot, directory / "allocation.png", outcomes, _draw_allocation),
        _plotted(pyplot, directory / "waits.png", outcomes, _draw_waits),
        _plotted(pyplot, directory / "figures.png", outcomes, _draw_figures),
    ]
    tables: dict[str, list[dict[str, Any]]] = {
        "policies": [facts_of(outcome) for outcome in outcomes],
        "tasks": [{"policy": outcome.policy, **run._asdict()} for outcome in outcomes for run in outcome.runs],
        "timeline": [{"policy": outcome.policy, **sample._asdict()} for outcome in outcomes for sample in outcome.samples],
    }
    for name, rows in tables.items():
        path = directory / f"{name}.parquet"
        parquet.write_table(arrow.Table.from_pylist(rows), path)
        written.append(path)
    return written


def _libraries() -> tuple[Any, Any, Any]:
    try:
        import matplotlib
        import pyarrow
        from pyarrow import parquet

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise plots_missing("--plots") from None
    return pyplot, pyarrow, parquet


def _plotted(pyplot: Any, path: Path, outcomes: Sequence[Outcome], draw: Any) -> Path:
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    try:
        draw(axes, outcomes)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)
    return path


def _draw_allocation(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        whole = max(1, outcome.capacity_milli)
        hours = [sample.at_ms / HOUR_MS for sample in outcome.samples]
        axes.step(hours, [100 * s.held_milli / whole for s in outcome.samples], where="post", label=outcome.policy, linewidth=1)
    axes.set_xlabel("hours of the trace")
    axes.set_ylabel("% of the GPUs (else cores) held")
    axes.set_ylim(0, 105)
    axes.legend()


def _draw_waits(axes: Any, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        waits = sorted(outcome.waits_ms)
        part = [100 * (index + 1) / len(waits) for index in range(len(waits))]
        axes.plot([max(wait, 1000) / HOUR_MS for wait in waits], part, label=outcome.policy)
    axes.set_xscale("log")
    axes.set_xlabel("hours waited, or less")
    axes.set_ylabel("% of the tasks")
    axes.legend()


def _draw_figures(axes: Any, outcomes: Sequence[Outcome]) -> None:
    names = ("allocation_ratio", "utilisation", "fragmentation", "fairness")
    width = 0.8 / max(1, len(outcomes))
    for index, outcome in enumerate(outcomes):
        facts = facts_of(outcome)
        axes.bar([place + index * width for place in range(len(names))], [facts[n] for n in names], width, label=outcome.policy)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(names))], [name.replace("_", " ") for name in names])
    axes.set_ylim(0, 1.05)
    axes.legend()
