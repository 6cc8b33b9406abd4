"""Agents and users that are nothing but their HTTP calls."""

from __future__ import annotations

from typing import Any

import httpx

GIB = 1024**3
clients: list[httpx.Client] = []


def _client(url: str, headers: dict[str, str]) -> httpx.Client:
    """Closed after the test that made it."""
    clients.append(httpx.Client(base_url=url, headers=headers, timeout=70))
    return clients[-1]


class FakeAgent:
    """Speaks for one node as an agent would, one call at a time."""

    def __init__(self, url: str, name: str, cpu: int = 8, gpus: int = 0, token: str | None = None, **declared: Any) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = _client(f"{url}/v1/agents/{name}", headers)
        amounts = {"cpu_milli": cpu * 1000, "memory_bytes": 64 * GIB, "disk_bytes": 100 * GIB}
        pools = {f"{name}-cpu": "cpu"} | ({f"{name}-gpu": "gpu"} if gpus else {})
        devices = [
            {"uuid": f"GPU-{name}-{i}", "index": i, "model": "A100", "gpu_type": "a100", "memory_mib": 40_000}
            | {"pool": f"{name}-gpu", "sharing": "time_slice"}
            for i in range(gpus)
        ]
        self.name = name
        self.declaration = {"capacity": amounts, "allocatable": amounts, "pools": pools, "devices": devices, **declared}

    def register(self) -> dict[str, Any]:
        answer = self.http.post("/register", json=self.declaration)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def leases(self, **params: Any) -> dict[str, Any]:
        answer = self.http.get("/leases", params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def lease_of(self, task: str) -> dict[str, Any]:
        return next(lease for lease in self.leases()["leases"] if lease["task"] == task)

    def report(self, lease: dict[str, Any], status: str, **more: Any) -> list[str]:
        body = {"allocation": lease["allocation"], "token": lease["token"], "status": status, **more}
        answer = self.http.post("/reports", json={"reports": [body]})
        assert answer.status_code == 200, answer.text
        return answer.json()["stale"]

    def heartbeat(self, **body: Any) -> httpx.Response:
        return self.http.post("/heartbeat", json=body)

    def run(self, task: str, exit_code: int = 0) -> None:
        """The whole life of a placed task."""
        lease = self.lease_of(task)
        self.report(lease, "running")
        self.report(lease, "succeeded" if exit_code == 0 else "failed", exit_code=exit_code)


class Api:
    """The caller's side."""

    def __init__(self, url: str, token: str | None = None, **headers: str) -> None:
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        self.http = _client(url, headers)

    def submit(self, key: str | None = None, **fields: Any) -> dict[str, Any]:
        headers = {"Idempotency-Key": key} if key else {}
        answer = self.http.post("/v1/tasks", json={"name": "job", "command": ["true"], **fields}, headers=headers)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def get(self, path: str, **params: Any) -> Any:
        answer = self.http.get(path, params=params)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def task(self, task_id: str, **params: Any) -> dict[str, Any]:
        return self.get(f"/v1/tasks/{task_id}", **params)

    def whats(self, task_id: str) -> list[str]:
        return [event["what"] for event in self.get(f"/v1/tasks/{task_id}/events")["events"]]
