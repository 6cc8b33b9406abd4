"""Keeps the collector of cyclic garbage off the cluster's state, which has no cycles: to look through 100,000 tasks takes it a
second each time, and nobody is served meanwhile."""

from __future__ import annotations

import gc

_THRESHOLDS = (10_000, 20, 50)
"""How many new objects make a look at the young ones, how many such looks one at the older ones, how many of those one at all.
Python's own (700, 10, 10) look at everything about every 70,000 objects, which is a few thousand submits."""


def look_seldom() -> None:
    """For the whole life of a process that holds the state."""
    gc.set_threshold(*_THRESHOLDS)


def set_apart() -> None:
    """What is there now is never looked at again. It is freed as ever when nobody uses it any more."""
    gc.freeze()
