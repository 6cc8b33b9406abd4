"""Strategies by name: each gives the nodes that fit a task a whole-number score, higher being better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from crater_core.scheduling.strategies.affinity import Affinity
from crater_core.scheduling.strategies.best_fit import BestFit
from crater_core.scheduling.strategies.fragmentation_aware import FragmentationAware
from crater_core.scheduling.strategies.load_balance import LoadBalance
from crater_core.scheduling.strategies.preemptive import Preemptive

if TYPE_CHECKING:
    from crater_core.scheduling.columns import BoolArray, IntArray
    from crater_core.scheduling.fits import Fits


class Strategy(Protocol):
    def score(self, fits: Fits, rows: IntArray, devices: BoolArray | None) -> IntArray:
        """One whole number between 0 and 1 << 30 for each row. Every row fits; `devices` says which devices do."""
        ...


STRATEGIES: dict[str, Strategy] = {
    "best_fit": BestFit(),
    "load_balance": LoadBalance(),
    "affinity": Affinity(),
    "preemptive": Preemptive(),
    "fragmentation_aware": FragmentationAware(),
}


def add_strategy(name: str, strategy: Strategy) -> None:
    """Take in a strategy from outside the project, at start, before the first decision. Its score must be pure."""
    assert name not in STRATEGIES, f"the strategy {name} is there already"
    STRATEGIES[name] = strategy
