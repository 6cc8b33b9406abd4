"""Inside a worker: what its own task has cost so far, for the materializations that it reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from dagster import DagsterInstance, MetadataValue

_STARTED = time.monotonic()
ASK_FOR_S = 1.0


def own_figures(instance: DagsterInstance) -> Callable[[], Mapping[str, MetadataValue]]:
    """As `reasons.figures`, asked of the scheduler when there is something to report; else what this process knows itself."""

    def figures() -> Mapping[str, MetadataValue]:
        task_id = os.environ.get("CRATER_TASK_ID")
        if not task_id:
            return {}
        from crater_core.errors import CraterError
        from crater_dagster.connect import client_of, link_to
        from crater_dagster.reasons import figures as figures_of

        client = client_of(instance, retry_for_s=ASK_FOR_S)
        link = link_to(instance, client, task_id)
        try:
            return figures_of(client.task(task_id), link)
        except CraterError:
            return _from_environment(task_id, link)

    return figures


def _from_environment(task_id: str, link: str) -> dict[str, MetadataValue]:
    ran_s = time.monotonic() - _STARTED
    core_hours = int(os.environ.get("CRATER_CPU_MILLI", "0")) / 1000 * ran_s / 3600
    devices = [uuid for uuid in os.environ.get("CRATER_GPU_UUIDS", "").split(",") if uuid]
    gpu_hours = int(os.environ.get("CRATER_GPU_COMPUTE_MILLI", "0")) / 1000 * len(devices) * ran_s / 3600
    return {
        "crater/task": MetadataValue.text(task_id),
        "crater/link": MetadataValue.url(link),
        "crater/node": MetadataValue.text(os.environ.get("CRATER_NODE", "?")),
        "crater/devices": MetadataValue.text(", ".join(devices) or "none"),
        "crater/ran_s": MetadataValue.float(ran_s),
        "crater/gpu_hours": MetadataValue.float(round(gpu_hours, 6)),
        "crater/core_hours": MetadataValue.float(round(core_hours, 6)),
    }
