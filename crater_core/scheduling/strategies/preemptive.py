"""As best fit, and a task that finds no room may take it from less important ones (see `preemption`)."""

from __future__ import annotations

from crater_core.scheduling.strategies.best_fit import BestFit


class Preemptive(BestFit):
    """Where there is room, the smallest sufficient place; where there is none, the cycle looks for victims."""
