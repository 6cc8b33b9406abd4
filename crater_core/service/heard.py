"""What agents say that is not worth a commit: that they are alive, what their workloads use, how to read their logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from crater_core.clock import Clock
from crater_core.model.allocation import Use


@dataclass(frozen=True, slots=True)
class Silence:
    node: str
    silent_ms: int


class Heard:
    """Ages are on the monotonic clock. A node counts as heard when this process started, and when it had itself slept."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_ms = self._looked_ms = clock.monotonic_ms()
        self._heard_ms: dict[str, int] = {}
        self._uses: dict[str, dict[str, Use]] = {}
        self.secrets: dict[str, str] = {}
        """By node, since it registered with this process; a node that is not here must register again."""

    def hear(self, node: str) -> None:
        self._heard_ms[node] = self._clock.monotonic_ms()

    def registered(self, node: str, secret: str) -> None:
        self.secrets[node] = secret
        self.hear(node)

    def used(self, node: str, uses: dict[str, Use]) -> None:
        self._uses[node] = uses

    def use_of(self, node: str, allocation: str) -> Use | None:
        return self._uses.get(node, {}).get(allocation)

    def age_ms(self, node: str) -> int:
        return self._clock.monotonic_ms() - self._heard_ms.get(node, self._started_ms)

    def forget(self, node: str) -> None:
        for known in (self._heard_ms, self._uses, self.secrets):
            known.pop(node, None)

    def look(self, nodes: Iterable[str], interval_ms: int, late_max_ms: int) -> list[Silence]:
        """Ages of all nodes now. Called about every `interval_ms`: to be later than `late_max_ms` was our own sleep, and is
        no node's fault. (A busy machine is always a little late; to excuse that too would keep dead nodes alive.)"""
        now_ms = self._clock.monotonic_ms()
        slept_ms = now_ms - self._looked_ms - interval_ms
        self._looked_ms = now_ms
        if slept_ms > late_max_ms:
            self._started_ms += slept_ms
            self._heard_ms = {node: min(now_ms, at_ms + slept_ms) for node, at_ms in self._heard_ms.items()}
        return [Silence(node, self.age_ms(node)) for node in nodes]
