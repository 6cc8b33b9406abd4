"""What an agent that is started anew still knows of its devices: the faults that no reading shows. A machine that has started
anew has begun its cards anew, too: then nothing of it holds."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from crater_agent.forked import write_record
from crater_agent.gpu_faults import Fault
from crater_agent.gpu_quarantine import Quarantine

log = logging.getLogger("crater.agent.gpu")


class KeptFaults:
    """DIRECTORY/gpus.json, with times of the machine's monotonic clock."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._directory, self._boot_id = directory, boot_id
        self._saved: dict[str, Quarantine] = {}

    def load(self) -> dict[str, Quarantine]:
        """By UUID. A file that is missing, damaged or of another boot counts as empty."""
        try:
            raw: Any = json.loads((self._directory / "gpus.json").read_bytes())
            if raw["boot_id"] == self._boot_id:
                self._saved = {uuid: _quarantine(kept) for uuid, kept in raw["quarantines"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return {}
        return dict(self._saved)

    def save(self, quarantines: Mapping[str, Quarantine]) -> None:
        """Writes only what has changed."""
        kept = {uuid: told for uuid, quarantine in quarantines.items() if (told := _told(quarantine)).faults}
        if kept == self._saved:
            return
        content = {"boot_id": self._boot_id, "quarantines": {uuid: asdict(quarantine) for uuid, quarantine in kept.items()}}
        try:
            write_record(str(self._directory), "gpus.json", content, durably=False)
        except OSError as error:
            log.warning("the faults of GPUs could not be kept for a restart: %s", error)
            return
        self._saved = kept


def _told(quarantine: Quarantine) -> Quarantine:
    """With what the driver has told of once; all else is seen again."""
    return replace(quarantine, faults=tuple(fault for fault in quarantine.faults if fault.code.startswith("xid_")))


def _quarantine(raw: Mapping[str, Any]) -> Quarantine:
    faults = tuple(Fault(**fault) for fault in raw["faults"])
    return Quarantine(faults, int(raw["since_ms"]), int(raw["bad_ms"]), int(raw["times"]))
