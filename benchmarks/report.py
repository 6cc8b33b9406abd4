"""Writes the figures down: `results.json` for programs, a table between two marks of `docs/performance.md` for people, a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN = "<!-- figures: written by `make bench` -->"
END = "<!-- end of figures -->"
Row = Mapping[str, Any]


def merged(path: Path, rows: Sequence[Row]) -> list[Row]:
    """The figures of earlier runs, with those measured now in the place of their namesakes."""
    before: list[Row] = json.loads(path.read_text()) if path.exists() else []
    new = {row["id"]: row for row in rows}
    return [new.pop(row["id"], row) for row in before] + list(new.values())


NOT_NAMED = "a machine that was not written down"


def write_results(path: Path, rows: Sequence[Row]) -> None:
    path.write_text(json.dumps(list(rows), indent=2) + "\n")


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| Figure | Crater | Beside it, in the same run | Times better | Target | Met |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        peer = f"{row['peer_value']:g} {row['unit']} ({row['peer']})" if row["peer"] else ""
        ratio = f"{row['ratio']:g}" if row["ratio"] is not None else ""
        met = {True: "yes", False: "**no**", None: ""}[row["met"]]
        lines.append(f"| `{row['id']}` | {row['value']:g} {row['unit']} | {peer} | {ratio} | {row['target'] or ''} | {met} |")
    return "\n".join(lines)


def write_page(page: Path, rows: Sequence[Row], when: str, plot: str | None, growth: str | None = None) -> None:
    """Put the table and the plots between the marks; what people wrote around them stays."""
    figures = [BEGIN, "", f"Written {when}; what was not measured anew on that day stays as it was."]
    for machine in dict.fromkeys(row["machine"] or NOT_NAMED for row in rows):
        there = [row for row in rows if (row["machine"] or NOT_NAMED) == machine]
        figures += ["", f"On {machine}:", "", table(there)]
    if plot:
        figures += ["", f"![How many times better than the peer]({plot})"]
    if growth:
        figures += ["", f"![How the cost of a decision grows with the cluster and with the queue]({growth})"]
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before.rstrip(), "", *figures, "", END]) + after)


def draw(path: Path, rows: Sequence[Row]) -> bool:
    """Bars of the ratios, a line at 1; False where matplotlib is not installed."""
    compared = [row for row in rows if row["ratio"] is not None]
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    if not compared:
        return False
    figure, axes = pyplot.subplots(figsize=(9, 0.6 * len(compared) + 1.2))
    colours = ["#2b7a4b" if row["met"] else "#b3541e" for row in compared]
    bars = axes.barh([row["id"] for row in compared], [row["ratio"] for row in compared], color=colours)
    axes.bar_label(bars, [f" {row['ratio']:g}× {row['peer']}" for row in compared], fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(0.1, max(10, *(row["ratio"] * 20 for row in compared)))
    axes.set_xlabel("times better than the peer (green: target met)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
