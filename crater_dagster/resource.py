"""`CraterResource`: the scheduler from inside an asset, a sensor or a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dagster import ConfigurableResource, InitResourceContext
from pydantic import PrivateAttr

from crater_core.client import CraterClient, ServiceCaller
from crater_core.wire.services import ServiceView
from crater_core.wire.tasks import TaskView
from crater_core.wire.usage import UsageReport
from crater_dagster.config import make_client


class CraterResource(ConfigurableResource):
    """Submit, wait, watch, scale, and query usage. `client` has everything else.

    `endpoint` and `token` may be `EnvVar`s; without them CRATER_ENDPOINT, CRATER_TOKEN and CRATER_TOKEN_FILE are used.
    """

    endpoint: str | None = None
    token: str | None = None
    project: str | None = None
    """For tasks and services that name none."""
    retry_for_s: float = 30.0
    """How long a call is tried again while no scheduler answers."""

    _client: CraterClient | None = PrivateAttr(default=None)

    @property
    def client(self) -> CraterClient:
        if self._client is None:
            self._client = make_client({"endpoint": self.endpoint, "token": self.token}, self.retry_for_s)
        return self._client

    def teardown_after_execution(self, context: InitResourceContext) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _own(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**({"project": self.project} if self.project else {}), **body}

    def submit(self, task: Mapping[str, Any] | None = None, *, idempotency_key: str | None = None, **fields: Any) -> TaskView:
        """Submit one task: `submit(name="train", command=["python", "train.py"], resources={"gpu": 1})`."""
        return self.client.submit(self._own({**(task or {}), **fields}), idempotency_key=idempotency_key)

    def submit_many(self, tasks: Sequence[Mapping[str, Any]], idempotency_keys: Sequence[str] | None = None) -> list[TaskView]:
        """All of them, or none."""
        return self.client.submit_many([self._own(task) for task in tasks], idempotency_keys)

    def wait(self, task_id: str, timeout_s: float | None = None) -> TaskView:
        """Until the task has ended, however it ended. Raises TimeoutError; the task goes on."""
        return self.client.wait(task_id, timeout_s)

    def run(self, task: Mapping[str, Any] | None = None, *, timeout_s: float | None = None, **fields: Any) -> TaskView:
        """Submit one task and wait for its end."""
        return self.wait(self.submit(task, **fields).id, timeout_s)

    def cancel(self, task_id: str, reason: str = "") -> TaskView:
        return self.client.cancel(task_id, reason)

    def deploy_service(
        self, service: Mapping[str, Any] | None = None, *, timeout_s: float = 300.0, wait: bool = True, **fields: Any
    ) -> ServiceView:
        """Deploy a service or roll it to this version, and wait until every replica is ready. Raises TimeoutError."""
        view = self.client.deploy(self._own({**(service or {}), **fields}))
        return self.client.wait_service(view.name, timeout_s) if wait else view

    def service(self, name: str) -> ServiceView:
        return self.client.service(name)

    def scale(self, name: str, replicas: int, reason: str = "") -> ServiceView:
        return self.client.scale(name, replicas, reason)

    def call_service(self, name: str) -> ServiceCaller:
        """Calls the service's ready replicas in turn."""
        return ServiceCaller(self.client, name)

    def usage(self, by: str = "project", from_ms: int | None = None, to_ms: int | None = None) -> UsageReport:
        """Hours held between two times, by project, user, quota_policy, node, task or name."""
        return self.client.usage(by, from_ms, to_ms)
