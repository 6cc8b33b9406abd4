"""Which Dagster instance a task belongs to, as a label: several instances may share one scheduler."""

from __future__ import annotations

import weakref

from dagster import DagsterInstance

from crater_dagster._dagster import storage_id

OWNER = "dagster/instance"
_known: weakref.WeakKeyDictionary[DagsterInstance, dict[str, str]] = weakref.WeakKeyDictionary()


def owner_label(instance: DagsterInstance) -> dict[str, str]:
    """Empty where the instance's storage has no id of its own. Asked of the storage once for each instance."""
    if instance not in _known:
        owner = storage_id(instance)
        _known[instance] = {OWNER: owner} if owner is not None else {}
    return _known[instance]
