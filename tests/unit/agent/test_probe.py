"""When a replica counts as ready, and when as failed."""

from __future__ import annotations

from crater_agent.probe import Health, step
from crater_core.model.reason import Reason, ReasonCode


def _after(*errors: str, age_ms: int = 1_000, start: Health = Health()) -> Health:  # noqa: B008
    for error in errors:
        start = step(start, error, age_ms, interval_ms=5_000, failures_max=3)
    return start


def test_one_good_answer_makes_it_ready():
    assert _after("refused", "refused", "") == Health(was_ready=True, ready=True)


def test_a_ready_replica_survives_fewer_failures_in_a_row_than_the_limit():
    health = _after("", "timeout", "timeout")
    assert (health.ready, health.unhealthy) == (True, None)
    assert _after("", "timeout", "timeout", "").failures == 0


def test_a_ready_replica_fails_at_the_limit_with_the_last_error():
    health = _after("", "timeout", "timeout", "it answers with status 500")
    assert health.ready is False
    assert health.unhealthy == Reason.of(ReasonCode.UNHEALTHY, failures=3, why="it answers with status 500")


def test_one_that_never_answered_has_a_minute():
    assert _after(*["refused"] * 50, age_ms=59_999).unhealthy is None
    assert _after("refused", age_ms=60_000).unhealthy is not None
