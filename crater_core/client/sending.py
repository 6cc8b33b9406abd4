"""How one call is sent until it is answered: which endpoint next, after how long, and when to give up. Without I/O.

`sending` is a generator that yields what to do (an `Attempt`, a `Pause`) and is sent what came of it, so that the sync and
the async client share every decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from crater_core.client.calls import Answer, Call
from crater_core.client.settings import checked_endpoint
from crater_core.errors import (
    BadConfiguration,
    CraterError,
    NotFound,
    NotLeader,
    SchedulerUnreachable,
    StaleRevision,
    Unavailable,
)
from crater_core.wire.problems import error_of

T = TypeVar("T")
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 2.0
HOPS_MAX = 3
"""Leaders followed in a row without a pause: two that name each other must not spin."""


@dataclass(frozen=True, slots=True)
class Attempt:
    endpoint: str
    call: Call[Any]


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """No answer. `unsent`: the scheduler cannot have acted. `hopeless`: another try cannot end otherwise (a certificate
    that is not trusted)."""

    why: str
    unsent: bool = False
    hopeless: bool = False


class Route:
    """Which endpoint to ask: the one that answered last, else the next in turn. Threads may share it."""

    def __init__(self, endpoints: tuple[str, ...]) -> None:
        self.endpoints = endpoints
        self.current = endpoints[0]

    def move_on(self, failed: str) -> None:
        """Turn to the next endpoint, unless another thread has done so."""
        if self.current == failed:
            place = self.endpoints.index(failed) + 1 if failed in self.endpoints else 0
            self.current = self.endpoints[place % len(self.endpoints)]

    def follow(self, asked: str, leader: str) -> bool:
        """Turn to the leader that a standby named, when it is a usable address of the same scheme."""
        try:
            address = checked_endpoint(leader)
        except BadConfiguration:
            return False
        if address == asked or address.partition(":")[0] != asked.partition(":")[0]:
            return False
        self.current = address
        return True


def sending(
    call: Call[T], route: Route, patience_s: float, monotonic_ms: Callable[[], int], chance: Callable[[], float]
) -> Generator[Attempt | Pause, Answer | Failure | None, T]:
    """Returns the parsed answer, or raises the problem that was answered, or SchedulerUnreachable. `chance` is in 0..1."""
    patience_s = patience_s if call.patience_s is None else call.patience_s
    until_ms = monotonic_ms() + round(patience_s * 1000)
    tries = hops = 0
    perhaps_done = False
    while True:
        endpoint = route.current
        outcome = yield Attempt(endpoint, call)
        error = _error_in(outcome, endpoint)
        if error is None:
            return _parsed(call, cast(Answer, outcome), endpoint)
        if perhaps_done and call.gone_is_done and isinstance(error, NotFound):
            return call.parse(cast(Answer, outcome))
        if not _worth_another_try(error):
            raise error
        tries += 1
        perhaps_done |= isinstance(outcome, Failure) and not outcome.unsent
        if isinstance(error, NotLeader) and hops < HOPS_MAX and route.follow(endpoint, str(error.fields.get("leader") or "")):
            hops += 1
            continue
        hops = 0
        if isinstance(outcome, Failure) or isinstance(error, NotLeader):
            route.move_on(endpoint)
        rounds, place = divmod(tries, len(route.endpoints))
        pause_s = _pause_s(rounds, chance()) if place == 0 else 0.0
        if monotonic_ms() + pause_s * 1000 > until_ms:
            raise _given_up(error, outcome, route, patience_s)
        if pause_s:
            yield Pause(pause_s)


def _pause_s(rounds: int, chance: float) -> float:
    return min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** min(rounds - 1, 10)) * (0.5 + chance / 2)


def _worth_another_try(error: CraterError) -> bool:
    return isinstance(error, Unavailable | NotLeader | StaleRevision) and not error.fields.get("hopeless")


def _error_in(outcome: Answer | Failure | None, endpoint: str) -> CraterError | None:
    assert outcome is not None, "an attempt has an outcome"
    if isinstance(outcome, Failure):
        if outcome.hopeless:
            return SchedulerUnreachable(f"{endpoint} cannot be used: {outcome.why}", endpoint=endpoint, hopeless=True)
        return SchedulerUnreachable(outcome.why, endpoint=endpoint)
    if outcome.status < 300:
        return None
    body = _problem(outcome)
    if body is not None:
        return error_of(outcome.status, body)
    if outcome.status >= 500:
        return SchedulerUnreachable(f"{endpoint} answered HTTP {outcome.status}", endpoint=endpoint, status=outcome.status)
    return _not_crater(endpoint, outcome.status)


def _problem(answer: Answer) -> dict[str, Any] | None:
    try:
        body: Any = json.loads(answer.content)
    except ValueError:
        return None
    return cast(dict[str, Any], body) if isinstance(body, dict) and "type" in body else None


def _parsed(call: Call[T], answer: Answer, endpoint: str) -> T:
    try:
        return call.parse(answer)
    except (ValidationError, ValueError):
        raise _not_crater(endpoint, answer.status) from None


def _not_crater(endpoint: str, status: int) -> SchedulerUnreachable:
    return SchedulerUnreachable(
        f"what answers at {endpoint} (HTTP {status}) is not a Crater scheduler that this client understands; "
        "check the address and port in CRATER_ENDPOINT, and the scheduler's version with `crater health`",
        endpoint=endpoint,
        status=status,
        hopeless=True,
    )


def _given_up(error: CraterError, outcome: Answer | Failure | None, route: Route, patience_s: float) -> CraterError:
    if isinstance(outcome, Answer) and not isinstance(error, SchedulerUnreachable):
        return error
    listed = ", ".join(route.endpoints)
    return SchedulerUnreachable(
        f"no scheduler answered at {listed} within {patience_s:g} s ({error.message}); check that crater-scheduler runs "
        f"there (`curl {route.endpoints[0]}/health`) and that CRATER_ENDPOINT names it",
        endpoints=list(route.endpoints),
        reason=error.message,
    )
