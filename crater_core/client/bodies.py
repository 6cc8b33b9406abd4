"""What a caller hands over, checked before anything is sent: the error names the field, as the scheduler's own would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from crater_core.errors import InvalidRequest

Body = TypeVar("Body", bound=BaseModel)
HEADER_MAX = 200


def body_of(model: type[Body], given: Body | Mapping[str, Any], where: str = "") -> Body:
    """`given` as the model. Raises InvalidRequest with `field` and, where one was found, `found`."""
    if isinstance(given, model):
        return given
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise invalid(error, where) from None


def invalid(error: ValidationError, where: str = "") -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"] if part != "[key]"]
    field = ".".join([*([where] if where else []), *parts])
    words = {"extra_forbidden": "no such field", "missing": "this field is missing"}
    why = words.get(first["type"]) or first["msg"].removeprefix("Value error, ")
    shown = first["input"] if isinstance(first["input"], str | int | float | bool | None) else None
    return InvalidRequest(f"{field}: {why}" if field else why, field=field, found=shown)


def checked_header(value: str, field: str) -> str:
    """A value that may stand in an HTTP header."""
    if not 0 < len(value) <= HEADER_MAX or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{field} must have 1 to {HEADER_MAX} printable ASCII characters", field=field)
    return value
