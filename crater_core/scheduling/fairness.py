"""What part of the cluster each project has, now and lately, so that among equals the one with less goes first."""

from __future__ import annotations

from collections.abc import Mapping

from crater_core.model.past import PastUse
from crater_core.model.snapshot import Settings
from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CPU, DISK, MEMORY, Bucket, Columns, Held, add

PARTS = 1_000_000
_NO_LAG = [0, 0, 0, 0]


class Shares:
    """The dominant share of each project: its largest part of the cluster's GPUs, cores, memory or disk, in millionths, over
    its weight. What it holds now and what it held on average lately count alike.
    """

    def __init__(
        self, columns: Columns, held: Mapping[Bucket, Held], settings: Settings, past: Mapping[str, PastUse], now_ms: int
    ) -> None:
        self._weights = settings.project_weights
        half_life_ms = settings.fair_share_half_life_ms
        self._lag = {name: [round(amount) for amount in one.lag_at(now_ms, half_life_ms)] for name, one in past.items()}
        total = columns.total.sum(0).tolist()
        self._total = [max(1, amount) for amount in (int(columns.gpus.sum()), total[CPU], total[MEMORY], total[DISK])]
        self._held: dict[str, Held] = {}
        self._share: dict[str, int] = {}
        for (project, _, _), amounts in held.items():
            self.take(project, amounts)

    @property
    def projects(self) -> set[str]:
        """All that hold something, or held something lately."""
        return {*self._held, *self._lag}

    def weight_of(self, project: str) -> int:
        return max(1, self._weights.get(project, MILLI))

    def held_by(self, project: str) -> Held:
        return self._held.get(project, [0] * 5)

    def average_of(self, project: str) -> list[int]:
        """What it held on average lately: GPU, CPU, memory, disk."""
        lag = self._lag.get(project, _NO_LAG)
        return [max(0, amount + late) for amount, late in zip(self.held_by(project), lag, strict=False)]

    def part_of(self, amounts: list[int]) -> int:
        """The largest part of the cluster that these amounts are, in millionths."""
        gpu, cpu, memory, disk = self._total
        return max(amounts[0] * PARTS // gpu, amounts[1] * PARTS // cpu, amounts[2] * PARTS // memory, amounts[3] * PARTS // disk)

    def of(self, project: str) -> int:
        share = self._share.get(project)
        if share is None:
            part = self.part_of(self.held_by(project)) if project in self._held else 0
            if project in self._lag:
                both = [now + past for now, past in zip(self.held_by(project), self.average_of(project), strict=False)]
                part = self.part_of(both) // 2
            share = self._share[project] = part * MILLI // self.weight_of(project)
        return share

    def take(self, project: str, amounts: Held, sign: int = 1) -> None:
        add(self._held.setdefault(project, [0] * 5), amounts, sign)
        self._share.pop(project, None)
