"""Which endpoint next, after how long, and when to give up: told with an httpx transport that answers from a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx
import pytest

from crater_core.client import AsyncCraterClient, CraterClient
from crater_core.client.sending import PAUSE_MAX_S, Route, _pause_s
from crater_core.errors import (
    Conflict,
    ImpossibleRequest,
    InvalidRequest,
    NotFound,
    SchedulerUnreachable,
    StoreUnavailable,
    Unauthenticated,
)

HEALTH = {
    "status": "ok",
    "version": "1",
    "leader": True,
    "revision": 7,
    "term": 1,
    "nodes_ready": 0,
    "tasks_queued": 0,
    "tasks_running": 0,
}
Reply = httpx.Response | Exception


def ok(body: object = HEALTH) -> httpx.Response:
    return httpx.Response(200, json=body)


def problem(status: int, code: str, detail: str = "so it is", **facts: object) -> httpx.Response:
    return httpx.Response(status, json={"type": f"urn:crater:{code}", "detail": detail, **facts})


class Script:
    """Answers each request with the next reply; the last one is repeated. Keeps the requests."""

    def __init__(self, *replies: Reply | Callable[[httpx.Request], Reply]) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        reply = reply(request) if callable(reply) and not isinstance(reply, Exception) else reply
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    @property
    def hosts(self) -> list[str]:
        return [request.url.host for request in self.requests]


def a_client(script: Script, endpoints: object = ("http://one:1", "http://two:2"), **options) -> CraterClient:
    return CraterClient(endpoints, transport=httpx.MockTransport(script), **options)


REFUSED = httpx.ConnectError("[Errno 111] Connection refused")
BROKEN = httpx.ReadError("broken off")


def test_the_next_endpoint_is_asked_at_once_when_one_refuses():
    script = Script(REFUSED, ok())
    with a_client(script) as client:
        assert client.health().revision == 7
        assert client.health().revision == 7
    assert script.hosts == ["one", "two", "two"]


def test_a_standby_names_the_leader_and_it_is_followed():
    script = Script(problem(421, "not_leader", leader="http://three:3"), ok())
    with a_client(script) as client:
        client.health()
        client.health()
    assert script.hosts == ["one", "three", "three"]


def test_a_leader_that_is_gone_leads_back_to_the_endpoints():
    script = Script(problem(421, "not_leader", leader="http://three:3"), REFUSED, ok())
    with a_client(script) as client:
        client.health()
    assert script.hosts == ["one", "three", "one"]


def test_a_standby_without_a_leader_is_left_and_asked_again_later():
    script = Script(problem(421, "not_leader"), problem(421, "not_leader", leader=""), ok())
    with a_client(script) as client:
        client.health()
    assert script.hosts == ["one", "two", "one"]


def test_two_that_name_each_other_do_not_spin():
    def other(request: httpx.Request) -> httpx.Response:
        return problem(421, "not_leader", leader="http://two:2" if request.url.host == "one" else "http://one:1")

    script = Script(other)
    with a_client(script, retry_for_s=0.3) as client, pytest.raises(Exception, match="so it is"):
        client.health()
    assert len(script.requests) < 30


@pytest.mark.parametrize("leader", ["ftp://three", "https://three:3", "http://user:pw@three", "nonsense nonsense", 7])
def test_an_address_that_cannot_be_a_leader_is_not_followed(leader: object):
    script = Script(problem(421, "not_leader", leader=leader), ok())
    with a_client(script) as client:
        client.health()
    assert script.hosts == ["one", "two"] if leader != 7 else True


def test_a_submit_is_repeated_with_the_same_key_and_body():
    view = {"id": "t1", "name": "x", "type": "batch", "status": "queued", "project": "default", "user": "u", "priority": 50}
    view |= {"requested": {}, "submitted_at_ms": 1}
    script = Script(BROKEN, problem(503, "store_unavailable"), ok(view))
    with a_client(script, "http://one:1") as client:
        assert client.submit({"name": "x", "command": ["true"]}).id == "t1"
    keys = {request.headers["Idempotency-Key"] for request in script.requests}
    bodies = {request.content for request in script.requests}
    assert (len(script.requests), len(keys), len(bodies)) == (3, 1, 1)
    assert json.loads(bodies.pop()) == {"name": "x", "command": ["true"]}


def test_it_gives_up_with_where_it_asked_and_what_to_check():
    with a_client(Script(REFUSED), retry_for_s=0.1) as client, pytest.raises(SchedulerUnreachable) as given_up:
        client.health()
    assert str(given_up.value) == (
        "no scheduler answered at http://one:1, http://two:2 within 0.1 s (connection refused); check that crater-scheduler "
        "runs there (`curl http://one:1/health`) and that CRATER_ENDPOINT names it"
    )
    assert given_up.value.fields["endpoints"] == ["http://one:1", "http://two:2"]


def test_trouble_of_the_store_keeps_its_own_words_after_the_last_try():
    script = Script(problem(503, "store_unavailable", "the disk is full"))
    with a_client(script, "http://one:1", retry_for_s=0.2) as client, pytest.raises(StoreUnavailable, match="the disk is full"):
        client.health()
    assert len(script.requests) > 1


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (problem(422, "impossible_request", field="resources.memory"), ImpossibleRequest),
        (problem(404, "not_found"), NotFound),
        (problem(401, "unauthenticated"), Unauthenticated),
        (problem(409, "conflict"), Conflict),
        (problem(413, "too_large"), InvalidRequest),
    ],
)
def test_a_refusal_is_raised_at_once_as_its_own_error(reply: httpx.Response, kind: type[Exception]):
    script = Script(reply)
    with a_client(script) as client, pytest.raises(kind):
        client.health()
    assert len(script.requests) == 1


@pytest.mark.parametrize("reply", [httpx.Response(200, text="<html>"), httpx.Response(404, text="no"), ok({"other": 1}), ok([1])])
def test_something_else_at_the_address_is_said_to_be_no_scheduler(reply: httpx.Response):
    script = Script(reply)
    with a_client(script) as client, pytest.raises(SchedulerUnreachable, match="what answers at http://one:1"):
        client.health()
    assert len(script.requests) == 1


def test_a_gateway_without_a_scheduler_behind_it_is_asked_again():
    script = Script(httpx.Response(502, text="bad gateway"), ok())
    with a_client(script, "http://one:1") as client:
        client.health()


def test_a_certificate_that_is_not_trusted_is_told_at_once():
    script = Script(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"))
    with a_client(script, "https://one:1") as client, pytest.raises(SchedulerUnreachable, match="SSL_CERT_FILE"):
        client.health()
    assert len(script.requests) == 1


def test_a_removal_whose_answer_was_lost_is_done():
    with a_client(Script(BROKEN, problem(404, "not_found"))) as client:
        client.remove_quota("q")
    # A connection that was never made has removed nothing.
    with a_client(Script(REFUSED, problem(404, "not_found"))) as client, pytest.raises(NotFound):
        client.remove_quota("q")


def test_pauses_grow_to_a_bound_and_are_spread_by_chance():
    assert [_pause_s(rounds, 1.0) for rounds in (1, 2, 3, 20)] == [0.05, 0.1, 0.2, PAUSE_MAX_S]
    assert _pause_s(20, 0.0) == PAUSE_MAX_S / 2


def test_threads_that_fail_together_move_on_once():
    route = Route(("http://one:1", "http://two:2", "http://three:3"))
    for _ in range(3):
        route.move_on("http://one:1")
    assert route.current == "http://two:2"


def test_the_async_client_decides_alike():
    async def story() -> list[str]:
        script = Script(REFUSED, problem(421, "not_leader", leader="http://three:3"), ok())
        async with AsyncCraterClient("http://one:1,http://two:2", transport=httpx.MockTransport(script)) as client:
            assert (await client.health()).revision == 7
        return script.hosts

    assert asyncio.run(story()) == ["one", "two", "three"]


def test_the_token_goes_with_every_call_and_shows_nowhere():
    script = Script(ok())
    with a_client(script, "http://one:1", token="s3cret", user="ann") as client:
        client.health()
        assert "s3cret" not in repr(client)
        assert "s3cret" not in repr(client._connection)
    assert script.requests[0].headers["Authorization"] == "Bearer s3cret"
    assert script.requests[0].headers["Crater-User"] == "ann"
