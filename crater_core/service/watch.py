"""What the passing of time brings: silent nodes, replicas due, a fresh look at the queue, old history to forget."""

from __future__ import annotations

import asyncio
import logging

from crater_core.errors import CraterError
from crater_core.lifecycle.inputs import NodeForgotten, NodeSilent
from crater_core.model.node import NodeStatus
from crater_core.service.config import HistorySettings
from crater_core.service.engine import Engine, Prepared

log = logging.getLogger("crater.watch")
LOOK_AGAIN_MS = 10_000
PRUNE_EVERY_MS = 600_000
PRUNE_STEP = 1000
DAY_MS = 86_400_000


class Watch:
    """One loop, several times in each heartbeat timeout."""

    def __init__(self, engine: Engine, timeout_ms: int, forget_after_ms: int, history: HistorySettings) -> None:
        self._engine = engine
        self._timeout_ms = timeout_ms
        self._forget_after_ms = forget_after_ms
        self._history = history
        self._interval_ms = max(50, min(1000, timeout_ms // 10))
        self._looked_at_queue_ms = self._pruned_ms = engine.clock.monotonic_ms()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            try:
                await self._look()
            except CraterError as error:
                log.warning("will look again: %s", error.message)
            except Exception:
                log.exception("a look at the cluster failed")

    async def _look(self) -> None:
        engine = self._engine
        if not engine.leading:
            return
        silent = self._silent_nodes()
        if silent:
            # They may have been heard while this waited for its turn.
            await engine.do(lambda _: Prepared([one for one in silent if self._is_silent(one.node)]))
            for node in [name for name in engine.heard.secrets if name not in engine.shown.snapshot.nodes]:
                engine.heard.forget(node)
        if engine.trouble is not None:
            engine.want_cycle()  # Tries a write, so that the end of the trouble is noticed.
        now_ms = engine.clock.monotonic_ms()
        if now_ms - self._looked_at_queue_ms >= LOOK_AGAIN_MS:
            self._looked_at_queue_ms = now_ms
            engine.want_services()
            engine.want_cycle()
        if now_ms - self._pruned_ms >= PRUNE_EVERY_MS:
            self._pruned_ms = now_ms
            await self.prune()

    def _silent_nodes(self) -> list[NodeSilent | NodeForgotten]:
        nodes = self._engine.shown.snapshot.nodes
        found: list[NodeSilent | NodeForgotten] = []
        for silence in self._engine.heard.look(list(nodes), self._interval_ms, self._timeout_ms // 3):
            lost = nodes[silence.node].status is NodeStatus.LOST
            forget = lost and silence.silent_ms > self._forget_after_ms
            if forget or (not lost and silence.silent_ms > self._timeout_ms):
                found.append(NodeSilent(silence.node, silence.silent_ms, forget))
            if forget:
                found.append(NodeForgotten(silence.node))
        return found

    def _is_silent(self, node: str) -> bool:
        return self._engine.heard.age_ms(node) > self._timeout_ms

    async def prune(self) -> int:
        """Forget old history, some at a time, so that commits can go in between."""
        engine, gone = self._engine, 0
        now_ms = engine.clock.now_ms()
        ended_before_ms = now_ms - self._history.keep_days * DAY_MS
        usage_before_ms = now_ms - self._history.usage_days * DAY_MS
        while step := await engine.write(
            engine.store.prune, ended_before_ms, self._history.tasks_max, usage_before_ms, PRUNE_STEP, engine.term
        ):
            gone += int(step)
            await asyncio.sleep(0.01)
        if gone:
            log.info("forgot %d ended task(s) beyond the kept history", gone)
        return gone
