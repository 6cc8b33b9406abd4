"""Strategies that other distributions bring, by the entry point group `crater.strategies`."""

from __future__ import annotations

from importlib.metadata import entry_points

from crater_core.errors import BadConfiguration
from crater_core.scheduling.strategies import STRATEGIES, add_strategy

GROUP = "crater.strategies"


def load_strategies() -> None:
    """Take in what is installed. Raises BadConfiguration that names the distribution whose strategy cannot be used."""
    for found in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        brought_by = found.dist.name if found.dist else "?"
        if found.name in STRATEGIES:
            raise BadConfiguration(f"strategy {found.name} of {brought_by}: found a name that is taken; expected one of its own")
        try:
            loaded = found.load()
            strategy = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:
            raise BadConfiguration(f"strategy {found.name} of {brought_by} cannot be loaded: {error}") from error
        if not callable(getattr(strategy, "score", None)):
            raise BadConfiguration(f"strategy {found.name} of {brought_by}: found no method `score`; expected a Strategy")
        add_strategy(found.name, strategy)
