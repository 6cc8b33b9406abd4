"""What projects held lately, so that fair share looks back: an average whose weight halves with every half-life."""

from __future__ import annotations

import math
from dataclasses import dataclass

RESOURCES = 4
"""GPU and CPU in thousandths, memory and disk in bytes, in this order."""


@dataclass(frozen=True, slots=True)
class PastUse:
    """A project's average holding less what it holds, at one time. It is written when an allocation begins or ends, in the
    same commit; in between it only decays, so that nothing has to be written while time passes.

    The average is that of an exponential window: the time constant is the half-life over ln 2. An allocation that begins
    leaves the average where it is, so the difference falls by what it holds; one that ends raises it again.
    """

    name: str
    """The project."""
    at_ms: int
    lag: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def lag_at(self, now_ms: int, half_life_ms: int) -> tuple[float, float, float, float]:
        part = decay(now_ms - self.at_ms, half_life_ms)
        gpu, cpu, memory, disk = self.lag
        return gpu * part, cpu * part, memory * part, disk * part


def decay(passed_ms: int, half_life_ms: int) -> float:
    """What is left of a weight after some time; 0 where the past counts for nothing."""
    if half_life_ms <= 0:
        return 0.0
    return math.exp2(-max(0, passed_ms) / half_life_ms)
