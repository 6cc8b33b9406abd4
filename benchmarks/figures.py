"""One measured figure as `results.json` has it, and the small arithmetic around it."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """`ratio` says how many times better than the peer: above one is better, whichever way the unit runs."""

    id: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    target: str | None = None
    met: bool | None = None
    machine: str = ""

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def lower_is_better(id: str, value: float, unit: str, peer: str, peer_value: float, at_most: float, more: bool = True) -> Figure:
    """`more` is a further condition of the target that the caller has checked."""
    ratio = round(peer_value / value, 2) if value else None
    met = value <= at_most and more
    return Figure(id, rounded(value), unit, peer, rounded(peer_value), ratio, f"at most {at_most:g} {unit}", met, machine())


def higher_is_better(id: str, value: float, unit: str, peer: str, peer_value: float, at_least: float) -> Figure:
    ratio = round(value / peer_value, 2) if peer_value else None
    return Figure(
        id,
        rounded(value),
        unit,
        peer,
        rounded(peer_value),
        ratio,
        f"at least {at_least:g} {unit}",
        value >= at_least and value > peer_value,
        machine(),
    )


def at_most(id: str, value: float, unit: str, limit: float) -> Figure:
    """A target without a peer that could be measured here."""
    return Figure(id, rounded(value), unit, target=f"at most {limit:g} {unit}", met=value <= limit, machine=machine())


def plain(id: str, value: float, unit: str) -> Figure:
    """A yardstick: no peer, no target."""
    return Figure(id, rounded(value), unit, machine=machine())


def rounded(value: float) -> float:
    return round(value, 3) if value < 10 else round(value, 1)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{cores} cores ({_processor()}), Linux {platform.release()}, Python {python}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
