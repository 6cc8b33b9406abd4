"""Draws how the cost of a decision grows with the cluster and with the queue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Row

CURVES = (
    (re.compile(r"placement\.nodes_(\d+k?)\.us"), "nodes", "µs a placement"),
    (re.compile(r"placement\.queue_(\d+k?)\.cycle_ms"), "waiting tasks, 1,000 full nodes, one of them freed", "ms a cycle"),
)


def points(rows: Sequence[Row], pattern: re.Pattern[str]) -> list[tuple[int, float]]:
    """Size and value of the figures whose id says a size, such as 100 or 100k; smallest first."""
    found = [(match[1], row["value"]) for row in rows if (match := pattern.fullmatch(row["id"]))]
    return sorted((int(size.removesuffix("k")) * (1000 if size.endswith("k") else 1), value) for size, value in found)


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """False where there is nothing to draw, or matplotlib is not installed."""
    curves = [points(rows, pattern) for pattern, _, _ in CURVES]
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    if not all(curves):
        return False
    figure, panes = pyplot.subplots(1, len(CURVES), figsize=(9, 3.2))
    for axes, curve, (_, size, cost) in zip(panes, curves, CURVES, strict=True):
        axes.plot(*zip(*curve, strict=True), marker="o", color="#2b7a4b")
        axes.set_xscale("log")
        axes.set_ylim(bottom=0, top=1.4 * max(value for _, value in curve))
        axes.set_xlabel(size)
        axes.set_ylabel(cost)
        for at in curve:
            axes.annotate(f"{at[1]:g}", at, textcoords="offset points", xytext=(0, 8), ha="center", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
