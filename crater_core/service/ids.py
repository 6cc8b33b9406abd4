"""Ids that sort by the time they were made."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from crater_core.clock import Clock

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_TAIL_BITS = 40


class Ids:
    """Makes ids of 10 characters of time and 8 of chance. Within one process each id is greater than the one before."""

    def __init__(self, clock: Clock, chance_bits: Callable[[int], int] = secrets.randbits) -> None:
        self._clock = clock
        self._chance_bits = chance_bits
        self._last = 0

    def new(self, prefix: str) -> str:
        fresh = (self._clock.now_ms() << _TAIL_BITS) | self._chance_bits(_TAIL_BITS - 1)
        # Some room to the next one, so that ids of one millisecond do not tell each other.
        self._last = fresh if fresh > self._last else self._last + 1 + self._chance_bits(16)
        return prefix + _base32(self._last)

    def many(self, prefix: str, count: int) -> tuple[str, ...]:
        return tuple(self.new(prefix) for _ in range(count))


def _base32(number: int) -> str:
    digits = [_DIGITS[(number >> shift) & 31] for shift in range(85, -1, -5)]
    return "".join(digits)
