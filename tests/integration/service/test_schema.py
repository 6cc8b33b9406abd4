"""Requests made from the OpenAPI schema, sensible and senseless: none may break the server."""

from __future__ import annotations

import re
from typing import Any

import httpx
import schemathesis
from harness import SchedulerProcess
from hypothesis import HealthCheck, given, settings

from .conftest import Api


def test_no_request_breaks_the_server(scheduler: SchedulerProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{scheduler.url}/openapi.json").exclude(path="/v1/events")  # Never ends.
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 25
    for operation in operations:

        @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            if case.query:
                case.query.pop("wait", None)  # A long poll that finds nothing is right to take its time.
            answer = case.call()
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert answer.headers["content-type"] == ["application/problem+json"]
                assert answer.json()["status"] == answer.status_code

        ask()


def test_the_schema_describes_every_call_of_the_api(api: Api) -> None:
    paths = api.get("/openapi.json")["paths"]
    calls = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    for call in (
        "POST /v1/tasks",
        "POST /v1/tasks:batch",
        "GET /v1/tasks/{task_id}/logs",
        "POST /v1/groups/{group}/cancel",
        "GET /v1/events",
        "PUT /v1/services/{name}",
        "POST /v1/agents/{node}/register",
        "GET /v1/usage",
        "GET /health",
    ):
        assert call in calls
    schemas = api.get("/openapi.json")["components"]["schemas"]
    assert {"TaskSubmission", "TaskView", "Problem", "NodeDeclaration", "Resources"} <= set(schemas)


def test_the_page_of_the_api_is_whole_and_fetches_nothing(scheduler: SchedulerProcess) -> None:
    answer = httpx.get(f"{scheduler.url}/docs", timeout=20)
    schema = httpx.get(f"{scheduler.url}/openapi.json", timeout=20).json()
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path, methods in schema["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in answer.text
    for name in re.findall('href="#([^"]+)"', answer.text):
        assert f'id="{name}"' in answer.text or name in schema["components"]["schemas"], name
    assert not re.search(r"<script|src=|https?://", answer.text)
