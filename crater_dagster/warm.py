"""Says what the workers of a run may have imported for them beforehand (see the agent's templates)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dagster import DagsterRun

from crater_core.errors import InvalidRequest
from crater_dagster._dagster import code_module

_WORDS = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}


def preload_of(run: DagsterRun, options: Mapping[str, Any]) -> list[str] | None:
    """Modules for a warm start, or None for a cold one: in an image, or switched off.

    Code that is loaded from a file rather than a module is read by each worker itself, after Dagster has been there already.
    """
    text = str(options.get("warm", "on")).lower()
    if text not in _WORDS:
        raise InvalidRequest(f"warm must be on or off, found {text!r}", field="warm")
    module = code_module(run)
    if not _WORDS[text] or options.get("image"):
        return None
    return [*([module] if module else []), "crater_dagster.preload"]
