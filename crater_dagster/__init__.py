"""Crater for Dagster: run launcher, step executor, Pipes client, resource, services, autoscaling and compute logs.

Names are loaded when they are first used: a process that only runs a step does not import what only a web server needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dagster_shared.libraries import DagsterLibraryRegistry

from crater_core import __version__

if TYPE_CHECKING:
    from crater_dagster.executor import crater_executor
    from crater_dagster.launcher import CraterRunLauncher
    from crater_dagster.tags import crater_tags

__all__ = ["CraterRunLauncher", "crater_executor", "crater_tags"]

_HOMES = {
    "CraterRunLauncher": "launcher",
    "crater_executor": "executor",
    "crater_tags": "tags",
}

DagsterLibraryRegistry.register("crater-dagster", __version__, is_dagster_package=False)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
