"""The client for code on a Dagster instance: as its own configuration says, else the run launcher's, else the environment."""

from __future__ import annotations

from dagster import DagsterInstance

from crater_core.client import CraterClient
from crater_dagster.config import make_client
from crater_dagster.launcher import CraterRunLauncher
from crater_dagster.options import Options
from crater_dagster.reasons import console_link


def launcher_of(instance: DagsterInstance) -> CraterRunLauncher | None:
    launcher = instance.run_launcher
    return launcher if isinstance(launcher, CraterRunLauncher) else None


def client_of(
    instance: DagsterInstance, config: Options | None = None, *, retry_for_s: float = 30.0, timeout_s: float = 10.0
) -> CraterClient:
    launcher, own = launcher_of(instance), config or {}
    connection = {name: own.get(name) or (launcher.connection.get(name) if launcher else None) for name in ("endpoint", "token")}
    return make_client(connection, retry_for_s, timeout_s)


def link_to(instance: DagsterInstance, client: CraterClient, task_id: str) -> str:
    """The task's page: under the launcher's `console_url`, else where this process reaches the scheduler."""
    launcher = launcher_of(instance)
    return console_link((launcher.console_url if launcher else None) or client.endpoints[0], task_id)
