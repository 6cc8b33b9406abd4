"""How much of the cluster each project holds, so that among equals the one with less goes first."""

from __future__ import annotations

from collections.abc import Mapping

from crater_core.model.units import MILLI
from crater_core.scheduling.columns import CPU, DISK, MEMORY, Bucket, Columns, Held, add

PARTS = 1_000_000


class Shares:
    """The dominant share of each project: its largest part of the cluster's GPUs, cores, memory or disk, in millionths,
    over its weight.
    """

    def __init__(self, columns: Columns, held: Mapping[Bucket, Held], weights: Mapping[str, int]) -> None:
        self._weights = weights
        total = columns.total.sum(0).tolist()
        self._total = [max(1, amount) for amount in (int(columns.gpus.sum()), total[CPU], total[MEMORY], total[DISK])]
        self._held: dict[str, Held] = {}
        self._share: dict[str, int] = {}
        for (project, _, _), amounts in held.items():
            self.take(project, amounts)

    def of(self, project: str) -> int:
        share = self._share.get(project)
        if share is None:
            held = self._held.get(project)
            gpu, cpu, memory, disk = self._total
            share = (
                max(held[0] * PARTS // gpu, held[1] * PARTS // cpu, held[2] * PARTS // memory, held[3] * PARTS // disk)
                if held
                else 0
            )
            share = share * MILLI // max(1, self._weights.get(project, MILLI))
            self._share[project] = share
        return share

    def take(self, project: str, amounts: Held, sign: int = 1) -> None:
        add(self._held.setdefault(project, [0] * 5), amounts, sign)
        self._share.pop(project, None)
