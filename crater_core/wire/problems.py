"""Each error's HTTP status, and its body as RFC 9457 problem details; back again to the same error in a client."""

from __future__ import annotations

from typing import Any

from crater_core import errors
from crater_core.errors import CraterError

_STATUS: dict[type[CraterError], int] = {
    errors.InvalidRequest: 400,
    errors.UnknownPool: 422,
    errors.ImpossibleRequest: 422,
    errors.BadConfiguration: 422,
    errors.NotFound: 404,
    errors.Denied: 403,
    errors.Unauthenticated: 401,
    errors.QuotaExceeded: 403,
    errors.PoolClosed: 409,
    errors.Conflict: 409,
    errors.NotLeader: 421,
    errors.Unavailable: 503,
    errors.NodeFault: 502,
}


def _all_errors(root: type[CraterError]) -> dict[str, type[CraterError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _all_errors(child)
    return found


def status_of(error: CraterError) -> int:
    """The status of the nearest class in the tree that has one."""
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def problem_of(error: CraterError) -> dict[str, Any]:
    """Problem details: `type` is the stable code, `detail` the sentence, further members the facts."""
    facts = {name: value for name, value in error.fields.items() if name not in ("type", "title", "status", "detail")}
    title = type(error).__name__
    return {
        "type": f"urn:crater:{error.code}",
        "title": title,
        "status": status_of(error),
        "detail": error.message,
        "retryable": error.retryable,
        **facts,
    }


def error_of(status: int, body: dict[str, Any]) -> CraterError:
    """The error that a problem body stands for; an unknown code becomes the nearest class by status."""
    code = str(body.get("type", "")).removeprefix("urn:crater:")
    kind = _all_errors(CraterError).get(code)
    if kind is None:
        kind = {401: errors.Unauthenticated, 403: errors.Denied, 404: errors.NotFound, 409: errors.Conflict}.get(status)
    if kind is None:
        kind = errors.Unavailable if status >= 500 else errors.InvalidRequest
    facts = {k: v for k, v in body.items() if k not in ("type", "title", "status", "detail", "retryable")}
    return kind(str(body.get("detail") or f"HTTP {status}"), **facts)
