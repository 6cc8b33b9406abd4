"""Crater for Dagster: run launcher, step executor, Pipes client, resource, services, autoscaling and compute logs.

Names are loaded when they are first used: a process that only runs a step does not import what only a web server needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dagster_shared.libraries import DagsterLibraryRegistry

from crater_core import __version__

if TYPE_CHECKING:
    from crater_core.lifecycle.autoscale import AutoscaleRule
    from crater_dagster.autoscale import build_autoscale_sensor
    from crater_dagster.executor import crater_executor
    from crater_dagster.launcher import CraterRunLauncher
    from crater_dagster.leaks import build_leak_sensor
    from crater_dagster.logs import CraterComputeLogManager
    from crater_dagster.pipes import PipesCraterClient
    from crater_dagster.resource import CraterResource
    from crater_dagster.services import inference_service_asset
    from crater_dagster.tags import crater_tags

__all__ = [
    "AutoscaleRule",
    "CraterComputeLogManager",
    "CraterResource",
    "CraterRunLauncher",
    "PipesCraterClient",
    "build_autoscale_sensor",
    "build_leak_sensor",
    "crater_executor",
    "crater_tags",
    "inference_service_asset",
]

_HOMES = {
    "AutoscaleRule": "crater_core.lifecycle.autoscale",
    "CraterComputeLogManager": "crater_dagster.logs",
    "CraterResource": "crater_dagster.resource",
    "CraterRunLauncher": "crater_dagster.launcher",
    "PipesCraterClient": "crater_dagster.pipes",
    "build_autoscale_sensor": "crater_dagster.autoscale",
    "build_leak_sensor": "crater_dagster.leaks",
    "crater_executor": "crater_dagster.executor",
    "crater_tags": "crater_dagster.tags",
    "inference_service_asset": "crater_dagster.services",
}

DagsterLibraryRegistry.register("crater-dagster", __version__, is_dagster_package=False)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
