"""Task arrays: many tasks made from one, each with an index; shown, waited for and cancelled as one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, WithJsonSchema

from crater_core.wire.base import Incoming, Outgoing, ReasonView
from crater_core.wire.tasks import TaskSubmission

MEMBERS_MAX = 10_000
INDEX_MAX = 2**31 - 1
_PART = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10})(?::([0-9]{1,10}))?)?")


def parse_indices(value: object) -> tuple[int, ...]:
    """Indices from a number of members (they count from 0), a list of numbers, or text: "0-99", "1,4,7", "0-30:10".

    Raises ValueError for what is none of these, given twice, or more than so many.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str, list, tuple)):
        raise ValueError(f'indices are a number of members, or text as "0-99" or "1,4,7-9", found {value!r:.100}')
    if isinstance(value, int):
        found: Sequence[int] = range(min(value, MEMBERS_MAX + 1))
    elif isinstance(value, str):
        found = [index for part in value.split(",") for index in _range(part.strip())]
    else:
        found = [_index(one) for one in cast(Sequence[object], value)]
    if not found:
        raise ValueError("an array has at least one member, found none")
    if len(found) > MEMBERS_MAX:
        raise ValueError(f"an array has at most {MEMBERS_MAX} members")
    if len(set(found)) != len(found):
        raise ValueError("an index is given twice")
    return tuple(sorted(found))


def _range(text: str) -> range:
    match = _PART.fullmatch(text)
    if match is None:
        raise ValueError(f'{text[:50]!r} is no index and no range such as "0-99" or "0-30:10"')
    first = _index(int(match[1]))
    last, step = _index(int(match[2])) if match[2] else first, int(match[3]) if match[3] else 1
    if last < first or step < 1:
        raise ValueError(f"{text!r}: a range goes up, in steps of 1 or more")
    found = range(first, last + 1, step)
    if len(found) > MEMBERS_MAX:
        raise ValueError(f"an array has at most {MEMBERS_MAX} members, {text!r} are {len(found)}")
    return found


def _index(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INDEX_MAX:
        raise ValueError(f"an index is a whole number from 0 to {INDEX_MAX}, found {value!r:.50}")
    return value


_JSON: dict[str, Any] = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MEMBERS_MAX},
        {"type": "string"},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
    ],
    "description": 'how many members, or their indices: "0-99", "1,4,7-9", "0-30:10"',
}
Indices = Annotated[tuple[int, ...], BeforeValidator(parse_indices), WithJsonSchema(_JSON)]


class ArraySubmission(Incoming):
    """Each member is a task with CRATER_ARRAY_INDEX; `{index}` in its command is that index."""

    task: TaskSubmission
    indices: Indices
    running_max: int | None = Field(default=None, ge=1, le=MEMBERS_MAX, description="how many may run at one time")


class ArrayView(Outgoing):
    """An array as a whole. `counts`: its tasks by status."""

    id: str
    name: str
    project: str
    user: str
    size: int
    running_max: int | None = None
    counts: dict[str, int] = {}
    reason: ReasonView | None = None
    """Why the first that waits does so."""
    submitted_at_ms: int
    ended: bool = False
    revision: int = 0
