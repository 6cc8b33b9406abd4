"""What the scheduling functions keep between two calls on one snapshot: columns, score columns, lanes.

It lies in the snapshot's `scratch` and is brought up to date from the snapshot's change logs before every decision. It saves
work and changes no result: a snapshot without it gives the same answers.
"""

from __future__ import annotations

from collections.abc import Callable

from crater_core.model.plan import Refused
from crater_core.model.prices import PriceTable
from crater_core.model.resources import TypicalRequest
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling.columns import Columns
from crater_core.scheduling.fits import Fits
from crater_core.scheduling.forecast import Forecast
from crater_core.scheduling.fragmentation import Mix
from crater_core.scheduling.queue import Queue
from crater_core.scheduling.shapes import Shape
from crater_core.scheduling.strategies import STRATEGIES

CELLS_MAX = 16_000_000
"""A bound on the score columns kept (shapes times nodes): 128 MB."""

FORECASTS_MAX = 64
"""A bound on the forecasts kept, one for each shape that is first in line."""
ANSWERS_MAX = 10_000
"""A bound on the answers of admission kept."""


class Memory:
    def __init__(self) -> None:
        self.columns = Columns()
        self.queue = Queue()
        self._fits: dict[Shape, Fits] = {}
        self._forecasts: dict[tuple[Shape, bool], Forecast] = {}
        self._sizes: dict[Shape, Refused | None] = {}
        self._pools: frozenset[str] = frozenset()
        self._declarations = -1
        self._expected: tuple[tuple[TypicalRequest, ...], PriceTable | None] | None = None
        self.mix = Mix(self.columns, ())

    def fits(self, shape: Shape) -> Fits:
        found = self._fits.pop(shape, None)
        if found is None:
            found = Fits(self.columns, shape, STRATEGIES[shape.strategy], self.mix)
            if len(self._fits) * len(self.columns.names) > CELLS_MAX:
                self._fits.pop(next(iter(self._fits)))
        self._fits[shape] = found  # Last used goes last; the first is the one to drop.
        return found

    def forecast(self, fits: Fits, sure_only: bool = False) -> Forecast:
        found = self._forecasts.get((fits.shape, sure_only))
        if found is None or found.fits is not fits:
            if len(self._forecasts) >= FORECASTS_MAX:
                self._forecasts.pop(next(iter(self._forecasts)))
            found = self._forecasts[fits.shape, sure_only] = Forecast(fits, sure_only)
        return found

    def sync(self, snapshot: Snapshot) -> None:
        expected = snapshot.settings.workload, snapshot.prices
        if self._expected is None or self._expected[0] != expected[0] or self._expected[1] is not expected[1]:
            self.mix = Mix(self.columns, *expected)
            self._fits.clear()
            self._expected = expected
        self.columns.sync(snapshot)
        self.mix.refresh()

    def pools(self, snapshot: Snapshot) -> frozenset[str]:
        """The names of all pools."""
        self._forget_declared(snapshot)
        return self._pools

    def too_large(self, snapshot: Snapshot, shape: Shape, look: Callable[[], Refused | None]) -> Refused | None:
        """The answer of `look`, which depends on the shape and on what nodes declare; kept until one declares otherwise."""
        self._forget_declared(snapshot)
        if shape not in self._sizes:
            self._sizes[shape] = look()
        return self._sizes[shape]

    def _forget_declared(self, snapshot: Snapshot) -> None:
        if self._declarations != self.columns.declarations or len(self._sizes) > ANSWERS_MAX:
            self._declarations = self.columns.declarations
            self._sizes.clear()
            self._pools = frozenset(pool for node in snapshot.nodes.values() for pool in node.pools)


def memory_of(snapshot: Snapshot) -> Memory:
    """The snapshot's memory, with its columns brought up to date."""
    memory = snapshot.scratch
    if not isinstance(memory, Memory):
        memory = snapshot.scratch = Memory()
    memory.sync(snapshot)
    return memory
