"""`make bench`: measures everything there is to measure here, and writes it down. `--only tasks,dagster` takes a part."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import growth, report, yardsticks
from benchmarks.cluster import a_cluster

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PAGE = HERE.parent / "docs" / "performance.md"
PLOT = PAGE.parent / "performance.png"
GROWTH = PAGE.parent / "growth.png"


def _yardsticks() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=HERE) as directory:
        return [figure.as_row() for figure in yardsticks.rows(Path(directory))]


def _on_a_cluster(module: str) -> Callable[[], list[dict[str, Any]]]:
    def measure() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="crater-bench-") as home, a_cluster(Path(home)) as cluster:
            return [figure.as_row() for figure in importlib.import_module(module).rows(cluster)]

    return measure


def _placement() -> list[dict[str, Any]]:
    if importlib.util.find_spec("benchmarks.placement") is None:
        return []
    return importlib.import_module("benchmarks.placement").rows()


def _waiting() -> list[dict[str, Any]]:
    return importlib.import_module("benchmarks.waiting").rows()


def _scale() -> list[dict[str, Any]]:
    return [figure.as_row() for figure in importlib.import_module("benchmarks.scale").rows()]


def _in_a_home(module: str) -> Callable[[], list[dict[str, Any]]]:
    def measure() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="crater-bench-") as home:
            return [figure.as_row() for figure in importlib.import_module(module).rows(Path(home))]

    return measure


PARTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "yardsticks": _yardsticks,
    "tasks": _on_a_cluster("benchmarks.tasks"),
    "dagster": _on_a_cluster("benchmarks.dagster_runs"),
    "dagster_postgres": _on_a_cluster("benchmarks.dagster_postgres"),
    "idle": _in_a_home("benchmarks.idle"),
    "gpus": _in_a_home("benchmarks.gpus"),
    "placement": _placement,
    "waiting": _waiting,
    "scale": _scale,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description="Measure Crater beside its peers.")
    parser.add_argument(
        "--only", default=",".join(PARTS), help="parts, with commas; what others have found before stays (default: %(default)s)"
    )
    parser.add_argument("--dry", action="store_true", help="print the figures, write no file")
    options = parser.parse_args(argv)
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows: list[dict[str, Any]] = []
    for part in wanted:
        print(f"measuring {part} ...", flush=True)
        found = PARTS[part]()
        rows += found
        for row in found:
            print(f"  {_line(row)}", flush=True)
    if not options.dry:
        known = report.merged(RESULTS, rows)
        plotted, grown = report.draw(PLOT, known), growth.draw(GROWTH, known)
        report.write_results(RESULTS, known)
        report.write_page(PAGE, known, time.strftime("%Y-%m-%d"), PLOT.name if plotted else None, GROWTH.name if grown else None)
        print(f"written: {RESULTS}, {PAGE}")
    missed = [row["id"] for row in rows if row["met"] is False]
    print(f"targets not met: {', '.join(missed)}" if missed else "every target is met")
    return 0


def _line(row: dict[str, Any]) -> str:
    text = f"{row['id']:<36} {row['value']:>10g} {row['unit']}"
    if row["peer"]:
        text += f"   {row['peer_value']:g} {row['peer']}: {row['ratio']:g} times better"
    return text + {True: "   met", False: f"   not met ({row['target']})", None: ""}[row["met"]]


if __name__ == "__main__":
    sys.exit(main())
