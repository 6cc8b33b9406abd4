"""Keeps containers on cores: an owner on its own, all others on those that nobody owns, also when that changes while they run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from crater_agent.cores import Cores
from crater_agent.docker_calls import Calls
from crater_agent.docker_engine import Engine
from crater_agent.docker_errors import EngineAway
from crater_agent.docker_life import Run
from crater_core.errors import RuntimeFailed

log = logging.getLogger("crater.agent.docker")
PATIENCE_S = 5.0
"""An engine that hangs keeps no process from its cores for longer."""


@dataclass(frozen=True, slots=True)
class ContainerCores:
    engine: Engine
    call: Calls
    cores: Cores
    runs: Mapping[str, Run]

    def of(self, run: Run) -> tuple[int, ...]:
        """The cores that it may run on now."""
        return run.record.cores or self.cores.shared

    async def settle(self) -> None:
        """Bring every container to the cores that it may run on now."""
        await asyncio.gather(*(self.settle_one(run) for run in self.runs.values()))

    async def settle_one(self, run: Run) -> None:
        async with run.moving:
            # What has changed while the engine was asked is asked again.
            while run.made and not run.ending and run.cores != (wanted := self.of(run)):
                try:
                    await asyncio.wait_for(self.call(self.engine.keep_on, run.name, wanted), PATIENCE_S)
                except (EngineAway, TimeoutError):
                    # Its group is held to them directly; the engine hears of it when it is back.
                    with contextlib.suppress(OSError):
                        if run.group is not None:
                            run.group.keep_on(wanted)
                    return
                except RuntimeFailed as error:
                    log.warning("%s could not be kept on cores %s: %s", run.record.allocation, wanted, error.message)
                    return
                run.cores = wanted
