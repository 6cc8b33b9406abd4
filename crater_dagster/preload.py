"""What a template imports so that run and step workers start as its forks: Dagster, this node's instance, and its storage.

Importing this module does the work; it leaves no thread and no open connection behind, so that a fork of it is sound.
"""

from __future__ import annotations

from crater_dagster import _dagster

_dagster.preload()
