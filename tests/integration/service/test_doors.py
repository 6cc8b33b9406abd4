"""Who may do what, and what is answered to bodies that make no sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from harness import SchedulerProcess, start_scheduler

from crater_core.service.auth import hash_of

from .conftest import Api

TASK = {"name": "job", "command": ["true"], "project": "ml", "resources": {"cpu": 0.5}}
ROLES = ("admin", "submitter", "narrow", "viewer", "agent", "unknown", "nobody")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchedulerProcess]:
    """A scheduler with a token for each role; a token's text is its name."""
    tokens = [{"name": role, "role": role, "sha256": hash_of(role)} for role in ("admin", "submitter", "viewer", "agent")]
    tokens.append({"name": "narrow", "role": "submitter", "projects": ["other"], "sha256": hash_of("narrow")})
    with start_scheduler(tmp_path_factory.mktemp("guarded"), tokens=tokens) as process:
        yield process


SERVICE = {"name": "web", "command": ["serve"], "project": "ml", "replicas": 0}
NODE = {"capacity": {"cpu_milli": 500}, "allocatable": {"cpu_milli": 500, "memory_bytes": 2**36}}
MATRIX: list[tuple[str, str, Any, dict[str, int]]] = [
    ("GET", "/health", None, dict.fromkeys(ROLES, 200)),
    ("GET", "/", None, dict.fromkeys(ROLES, 200)),
    ("GET", "/openapi.json", None, dict.fromkeys(ROLES, 200)),
    ("GET", "/v1/tasks", None, {"admin": 200, "submitter": 200, "narrow": 200, "viewer": 200, "agent": 403}),
    ("POST", "/v1/tasks", TASK, {"admin": 201, "submitter": 201, "narrow": 403, "viewer": 403, "agent": 403}),
    ("POST", "/v1/tasks:batch", {"tasks": [TASK]}, {"admin": 201, "submitter": 201, "narrow": 403, "viewer": 403, "agent": 403}),
    ("GET", "/v1/nodes", None, {"admin": 200, "submitter": 200, "narrow": 200, "viewer": 200, "agent": 403}),
    ("POST", "/v1/nodes/n/cordon", None, {"admin": 404, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("POST", "/v1/nodes/n/drain", {}, {"admin": 404, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("GET", "/v1/reservations", None, {"admin": 200, "submitter": 200, "narrow": 200, "viewer": 200, "agent": 403}),
    ("DELETE", "/v1/reservations/r", None, {"admin": 404, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("PUT", "/v1/quotas/q", {}, {"admin": 200, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("DELETE", "/v1/quotas/nope", None, {"admin": 404, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("PUT", "/v1/services/web", SERVICE, {"admin": 201, "submitter": 200, "narrow": 403, "viewer": 403, "agent": 403}),
    (
        "POST",
        "/v1/services/web/scale",
        {"replicas": 0},
        {"admin": 200, "submitter": 200, "narrow": 403, "viewer": 403, "agent": 403},
    ),
    ("GET", "/v1/backup", None, {"admin": 200, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("GET", "/v1/snapshot", None, {"admin": 200, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 403}),
    ("GET", "/v1/usage", None, {"admin": 200, "submitter": 200, "narrow": 200, "viewer": 200, "agent": 403}),
    ("POST", "/v1/agents/n/register", NODE, {"admin": 200, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 200}),
    ("GET", "/v1/agents/n/leases", None, {"admin": 200, "submitter": 403, "narrow": 403, "viewer": 403, "agent": 200}),
    ("GET", "/v1/no/such/path", None, {"admin": 404, "submitter": 404, "narrow": 404, "viewer": 404, "agent": 403}),
]


@pytest.mark.parametrize(("method", "path", "body", "expected"), MATRIX, ids=[f"{m[0]} {m[1]}" for m in MATRIX])
def test_each_role_reaches_as_far_as_the_table_says(
    guarded: SchedulerProcess, method: str, path: str, body: Any, expected: dict[str, int]
) -> None:
    got = {}
    for role in ROLES:
        headers = {} if role == "nobody" else {"Authorization": f"Bearer {role}"}
        answer = httpx.request(method, guarded.url + path, json=body, headers=headers)
        got[role] = answer.status_code
        if answer.status_code in (401, 403):
            assert answer.headers["content-type"] == "application/problem+json"
    assert got == {"unknown": 401, "nobody": 401, **expected}


def test_no_route_is_open_to_nobody_and_no_writing_one_to_a_viewer(guarded: SchedulerProcess) -> None:
    """Of every route that the service describes, whoever added it."""
    paths = httpx.get(guarded.url + "/openapi.json").json()["paths"]
    assert len(paths) > 30
    for path, methods in paths.items():
        for method in methods:
            where = f"{method.upper()} {path}"
            url = guarded.url + path.replace("{", "").replace("}", "")
            if not path.startswith("/v1/"):
                continue  # Health, readiness and the like: see the table.
            assert httpx.request(method, url, json={}).status_code == 401, where
            if method != "get":
                answer = httpx.request(method, url, json={}, headers={"Authorization": "Bearer viewer"})
                assert answer.status_code == 403, f"{where}: {answer.status_code}"
            if not path.startswith("/v1/agents/"):
                answer = httpx.request(method, url, json={}, headers={"Authorization": "Bearer agent"})
                assert answer.status_code == 403, f"{where}: {answer.status_code}"


def test_a_token_cannot_cancel_in_a_project_it_does_not_reach(guarded: SchedulerProcess) -> None:
    task = Api(guarded.url, "submitter").submit(**TASK, group="g")
    narrow = Api(guarded.url, "narrow")
    assert narrow.http.post(f"/v1/tasks/{task['id']}/cancel").status_code == 403
    assert narrow.http.post("/v1/groups/g/cancel").status_code == 403
    assert narrow.http.delete("/v1/services/web").status_code in (403, 404)
    assert narrow.task(task["id"])["status"] == "queued"


def test_a_task_belongs_to_the_tokens_name_or_to_whom_an_administrator_says(guarded: SchedulerProcess) -> None:
    assert Api(guarded.url, "submitter").submit(**TASK)["user"] == "submitter"
    assert Api(guarded.url, "admin", **{"Crater-User": "ann"}).submit(**TASK)["user"] == "ann"
    answer = Api(guarded.url, "submitter", **{"Crater-User": "ann"}).http.post("/v1/tasks", json=TASK)
    assert (answer.status_code, answer.json()["field"]) == (403, "Crater-User")


WRONG: list[tuple[str, Any, int, str]] = [
    ("unknown field", {**TASK, "comand": []}, 422, "comand"),
    ("unknown field inside", {**TASK, "resources": {"cpus": 1}}, 422, "resources.cpus"),
    ("missing name", {"command": ["true"]}, 422, "name"),
    ("wrong type", {**TASK, "priority": "high"}, 422, "priority"),
    ("out of range", {**TASK, "priority": 101}, 422, "priority"),
    ("wrong unit", {**TASK, "resources": {"memory": "10 parsecs"}}, 422, "resources.memory"),
    ("endless number", {**TASK, "resources": {"memory": "1e999999999"}}, 422, "resources.memory"),
    ("not a number", {**TASK, "resources": {"cpu": "NaN"}}, 422, "resources.cpu"),
    ("negative", {**TASK, "resources": {"cpu": -1}}, 422, "resources.cpu"),
    ("huge", {**TASK, "resources": {"cpu": 10**30}}, 422, "resources.cpu"),
    ("huge float", {**TASK, "resources": {"memory": 1e308}}, 422, "resources.memory"),
    ("huge member count", {**TASK, "members": 10**30}, 422, "members"),
    ("NUL in a command", {**TASK, "command": ["a\0b"]}, 422, "command.0"),
    ("NUL in a name", {**TASK, "name": "a\0b"}, 422, "name"),
    ("a shell line", {**TASK, "command": "echo hello"}, 422, "command"),
    ("nothing to run", {"name": "x"}, 422, ""),
    ("a path that climbs", {**TASK, "working_dir": "/a/../../etc"}, 422, "working_dir"),
    ("the agent's own variables", {**TASK, "env": {"CRATER_TASK": "x"}}, 422, "env.CRATER_TASK"),
    ("a list", [], 422, ""),
]


@pytest.mark.parametrize(("body", "status", "field"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_a_wrong_body_is_refused_with_its_field(api: Api, body: Any, status: int, field: str) -> None:
    answer = api.http.post("/v1/tasks", content=json.dumps(body))
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (status, status)
    assert problem["field"] == field
    assert problem["detail"]
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"name": "\\ud800"}', b"[" * 100_000, b"null"])
def test_a_body_that_is_no_json_object_is_refused(api: Api, data: bytes) -> None:
    answer = api.http.post("/v1/tasks", content=data)
    assert answer.status_code in (400, 422)
    assert answer.json()["type"] == "urn:crater:invalid_request"


def test_a_body_over_the_bound_is_refused(api: Api) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(33):
            yield b"x" * 1024**2

    for content in (b"x" * (33 * 1024**2), chunks()):
        try:
            answer = api.http.post("/v1/tasks", content=content)
        except (httpx.WriteError, httpx.ReadError):
            continue  # It hung up before all of it was sent, which is a refusal too.
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:crater:too_large")
    assert api.get("/health")["status"] == "ok"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/tasks?limit=0", "limit"),
        ("/v1/tasks?limit=x", "limit"),
        ("/v1/tasks?status=done", "status.0"),
        ("/v1/tasks?label=x", "label"),
        ("/v1/tasks?cursor=..", "cursor"),
        ("/v1/changes?wait=61", "wait"),
        ("/v1/changes?after=-1", "after"),
        ("/v1/usage?by=colour", "by"),
        ("/v1/usage?from_ms=5&to_ms=5", "from_ms"),
        (f"/v1/usage?from_ms={10**30}", "from_ms"),
        ("/v1/events?subject=x", "subject"),
    ],
)
def test_a_wrong_parameter_is_refused_with_its_name(api: Api, path: str, field: str) -> None:
    answer = api.http.get(path)
    assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_errors_of_the_server_are_problem_details_too(api: Api) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("PATCH", "/v1/tasks", 405),
        ("GET", "/v1/tasks/t0", 404),
        ("GET", "/v1/nodes/n0", 404),
        ("GET", "/v1/services/s0", 404),
        ("GET", "/v1/quotas/q0", 404),
    ):
        answer = api.http.request(method, path)
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
        assert answer.json()["status"] == status


def test_answers_carry_the_security_headers(api: Api) -> None:
    headers = api.http.get("/health").headers
    assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/tasks", {"name": "x"}),
        ("POST", "/v1/tasks", {**TASK, "oops": 1}),
        ("GET", "/v1/tasks/t-unknown", None),
        ("GET", "/v1/agents/nobody/leases", None),
        ("POST", "/v1/agents/nobody/heartbeat", {}),
        ("POST", "/v1/agents/nobody/reports", {"reports": []}),
    ],
)
def test_the_short_way_and_the_frameworks_way_answer_alike(api: Api, method: str, path: str, body: Any) -> None:
    short = api.http.request(method, path, json=body)
    long = api.http.request(method, path + "?unknown=1", json=body)
    assert (short.status_code, short.json(), short.headers["content-type"]) == (
        long.status_code,
        long.json(),
        long.headers["content-type"],
    )


def test_the_console_page_runs_only_its_own_script(api: Api) -> None:
    answer = api.http.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for attribute in ("http://", "https://", " onclick=", " style=", " src="):
        assert attribute not in answer.text
