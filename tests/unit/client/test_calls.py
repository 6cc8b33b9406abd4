"""What is sent, and what is refused before it is sent."""

from __future__ import annotations

import json

import pytest

from crater_core.client import CraterClient, calls
from crater_core.client.balance import Turns
from crater_core.client.settings import DEFAULT_ENDPOINT, connection, endpoint_from_env, token_from_env
from crater_core.client.stream import EventLines
from crater_core.errors import BadConfiguration, InvalidRequest
from crater_core.wire.nodes import QuotaBody
from crater_core.wire.services import ServiceBody


def test_names_in_a_path_cannot_climb_out_of_it():
    assert calls.node("a/../../b?x#y").path == "/v1/nodes/a%2F..%2F..%2Fb%3Fx%23y"
    assert calls.cancel_group("run/1", "").path == "/v1/groups/run%2F1/cancel"
    for nothing in ("", ".", ".."):
        with pytest.raises(InvalidRequest):
            calls.task(nothing)


def test_only_what_was_said_is_sent():
    assert json.loads(calls.set_quota("q", {"limits": {"gpu": 2, "memory": "1GB"}}).body or b"") == {
        "limits": {"gpu": "2000m", "memory": 10**9}
    }
    body = QuotaBody(projects=("a",))
    assert json.loads(calls.set_quota("q", body).body or b"") == {"projects": ["a"]}


def test_what_is_sent_is_read_as_what_was_meant():
    asked = {"name": "web", "command": ["serve", "{port}"], "replicas": 2, "resources": {"gpu": 0.25, "gpu_memory": "10GiB"}}
    sent = ServiceBody.model_validate_json(calls.deploy(asked).body or b"")
    assert sent == ServiceBody.model_validate(asked)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"name": "x", "command": ["a"], "memery": 1}, "memery", "memery: no such field"),
        ({"command": ["a"]}, "name", "name: this field is missing"),
        ({"name": "x", "command": ["a"], "resources": {"memory": "3QB"}}, "resources.memory", "unknown unit 'QB'"),
        ({"name": "x", "command": ["a"], "priority": 101}, "priority", "less than or equal to 100"),
        ({"name": "x"}, "", "command is missing"),
        ({"name": "x", "command": ["a"], "env": {"CRATER_X": "1"}}, "env.CRATER_X", "set by the agent"),
    ],
)
def test_a_wrong_task_is_refused_by_field_before_it_is_sent(body: dict, field: str, words: str):
    with pytest.raises(InvalidRequest, match=words) as refused:
        calls.submit(body, None)
    assert refused.value.fields["field"] == field


def test_one_wrong_task_of_many_is_named_by_its_place():
    with pytest.raises(InvalidRequest, match=r"tasks\.1\.name: this field is missing"):
        calls.submit_many([{"name": "x", "command": ["a"]}, {"command": ["a"]}], None)
    with pytest.raises(InvalidRequest, match="1 keys for 2 tasks"):
        calls.submit_many([{"name": "x", "command": ["a"]}] * 2, ["k"])


@pytest.mark.parametrize("key", ["a\r\nEvil: 1", "ü", "k" * 201])
def test_a_key_that_no_header_can_hold_is_refused(key: str):
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        calls.submit({"name": "x", "command": ["a"]}, key)


def test_lists_are_asked_for_as_the_api_names_things():
    wanted = calls.TaskQuery(("queued", "running"), project="p", labels={"a": "1", "b": "x=y"})
    assert calls.tasks(wanted, 5, None).query == (
        ("project", "p"),
        ("status", "queued"),
        ("status", "running"),
        ("label", "a=1"),
        ("label", "b=x=y"),
        ("limit", "5"),
    )


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, (DEFAULT_ENDPOINT,)),
        ("host:8080", ("http://host:8080",)),
        ("http://a:1/, https://b:2", ("http://a:1", "https://b:2")),
        (["http://a:1", "http://a:1/"], ("http://a:1",)),
        ("http://[::1]:8080", ("http://[::1]:8080",)),
        ("http://gate/crater", ("http://gate/crater",)),
    ],
)
def test_endpoints_are_read_as_people_write_them(given: object, found: tuple[str, ...]):
    assert connection(given, None).endpoints == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", ["", " , ", "ftp://x", "http://", "http://u:p@x", "http://x:port", "http://x:99999", "http://a b"]
)
def test_an_endpoint_that_makes_no_sense_is_refused(wrong: str):
    with pytest.raises(BadConfiguration) as refused:
        connection([wrong], None)
    assert refused.value.fields["field"] == "endpoint"


def test_a_token_with_a_line_end_is_refused_without_being_shown():
    with pytest.raises(BadConfiguration) as refused:
        CraterClient("http://x:1", "secret\nEvil: 1")
    assert "secret" not in str(refused.value)
    assert refused.value.fields["field"] == "token"


def test_the_environment_says_where_and_who(tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text("from-file\n")
    assert endpoint_from_env({}) == DEFAULT_ENDPOINT
    assert endpoint_from_env({"CRATER_ENDPOINT": " http://a:1 "}) == "http://a:1"
    assert token_from_env({}) is None
    assert token_from_env({"CRATER_TOKEN_FILE": str(token_file)}) == "from-file"
    assert token_from_env({"CRATER_TOKEN": "direct", "CRATER_TOKEN_FILE": str(token_file)}) == "direct"
    with pytest.raises(BadConfiguration, match="CRATER_TOKEN_FILE"):
        token_from_env({"CRATER_TOKEN_FILE": str(tmp_path / "none")})


def test_events_are_read_line_by_line_and_a_half_one_is_dropped():
    data = '{"at_ms":1,"subject":"task","id":"t1","what":"queued","sequence":7}'
    reader = EventLines()
    assert [reader.feed(line) for line in (": crater", "", "id: 7", "event: task", f"data: {data}")] == [None] * 5
    event = reader.feed("")
    assert event is not None
    assert (event.what, reader.last) == ("queued", 7)
    reader.feed("data: {half")
    reader.broken()
    assert reader.feed("") is None


def test_replicas_take_turns():
    turns = Turns()
    assert [turns.order(["a", "b", "c"])[0] for _ in range(4)] == ["a", "b", "c", "a"]
    assert turns.order([]) == []
