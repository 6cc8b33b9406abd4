"""What is as its default says is not stored, so the defaults of what is stored are part of the stored form."""

from __future__ import annotations

import json
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from crater_core.model.history import Event
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.model.usage import UsageRecord
from crater_core.store.codec import decode, encode
from crater_core.store.rows import KINDS

KNOWN = Path(__file__).with_name("stored_defaults.json")


def _inside(hint: Any) -> list[type]:
    """The dataclasses that a type is made of."""
    if is_dataclass(hint) and isinstance(hint, type):
        return [hint]
    return [found for part in typing.get_args(hint) for found in _inside(part)]


def defaults() -> dict[str, str]:
    """By class and field, for all that is stored and all that it holds."""
    found: dict[str, str] = {}
    left: list[type] = [*KINDS.values(), Task, Event, UsageRecord]
    seen: set[type] = set()
    while left:
        kind = left.pop()
        if kind in seen:
            continue
        seen.add(kind)
        hints = typing.get_type_hints(kind)
        for field in fields(kind):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if default is not MISSING:
                found[f"{kind.__name__}.{field.name}"] = repr(default)
            left += _inside(hints[field.name])
    return dict(sorted(found.items()))


def test_no_default_of_what_is_stored_has_changed_or_gone() -> None:
    """Where one must change: a step of the schema writes the old one into the rows that leave it out, then it changes here."""
    known: dict[str, str] = json.loads(KNOWN.read_text())
    now = defaults()
    assert {name: now.get(name) for name in known} == known


def test_every_default_of_what_is_stored_is_known() -> None:
    assert defaults().keys() - json.loads(KNOWN.read_text()).keys() == set()


def test_what_is_as_its_default_says_is_left_out_and_comes_back() -> None:
    task = Task("t1", TaskSpec("job", command=("true",), priority=50, grace_ms=1), TaskStatus.QUEUED, 1, 2)
    stored = json.loads(encode(task))
    assert stored == {
        "id": "t1",
        "spec": {"name": "job", "command": ["true"], "grace_ms": 1},
        "status": "queued",
        "submitted_at_ms": 1,
        "queued_at_ms": 2,
    }
    assert decode(Task, encode(task)) == task


def test_a_task_that_was_stored_with_all_its_fields_is_read_as_before() -> None:
    body = b'{"id":"t1","spec":{"name":"job","priority":50,"command":[],"labels":{}},"status":"queued","submitted_at_ms":1,' + (
        b'"queued_at_ms":2,"reason":null,"attempt":0,"ready":false}'
    )
    assert decode(Task, body) == Task("t1", TaskSpec("job"), TaskStatus.QUEUED, 1, 2)
