"""`inference_service_asset(...)`: an asset that is a running service; materialising it deploys or rolls that service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dagster import AssetExecutionContext, AssetsDefinition, AutomationCondition, MaterializeResult, MetadataValue, asset

from crater_core.wire.services import ServiceBody, ServiceView
from crater_dagster.connect import client_of
from crater_dagster.options import pools_of

Extra = Callable[[AssetExecutionContext], Mapping[str, Any]]


def inference_service_asset(
    name: str,
    *,
    command: Sequence[str] = (),
    image: str | None = None,
    replicas: int = 1,
    resources: Mapping[str, Any] | None = None,
    health_path: str = "/health",
    deps: Iterable[Any] = (),
    env: Mapping[str, str] | None = None,
    extra: Extra | None = None,
    service_name: str | None = None,
    pool: str | Sequence[str] | None = None,
    project: str = "default",
    quota_policy: str | None = None,
    op_tags: Mapping[str, str] | None = None,
    group_name: str | None = None,
    description: str | None = None,
    automation_condition: AutomationCondition[Any] | None = None,
    ready_timeout_s: float = 300.0,
    **fields: Any,
) -> AssetsDefinition:
    """Each replica runs `command` (`{port}` becomes its port) and answers GET `health_path`; the asset is materialised once
    all replicas of the new version are ready, with their addresses in its metadata.

    `extra(context)` gives fields that are known only when it runs, such as an `env` with the path of the newest model; they
    win. `fields` are further fields of a service. A version that does not become ready fails the asset with the replicas'
    reasons. The number of replicas that a scaling rule has chosen is kept when only the version changes.
    """
    body: dict[str, Any] = {
        "name": service_name or name,
        "command": list(command),
        "image": image,
        "replicas": replicas,
        "resources": dict(resources or {}),
        "health": {"path": health_path},
        "env": dict(env or {}),
        "pools": pools_of(pool) or [],
        "project": project,
        "quota_policy": quota_policy,
        **fields,
    }
    ServiceBody.model_validate({**body, "command": list(command) or ["checked when it runs"]})

    @asset(
        name=name,
        deps=list(deps),
        op_tags=dict(op_tags or {}),
        group_name=group_name,
        description=description or f"The service {body['name']}, {replicas} replica(s).",
        kinds={"crater", "service"},
        automation_condition=automation_condition,
    )
    def service_asset(context):  # Without annotations: Dagster reads them, and here they would be texts to it.
        return MaterializeResult(metadata=_deploy(context, body, extra, ready_timeout_s))

    return service_asset


def _deploy(
    context: AssetExecutionContext, body: Mapping[str, Any], extra: Extra | None, timeout_s: float
) -> dict[str, MetadataValue]:
    wanted, late = dict(body), extra(context) if extra is not None else {}
    for field, value in late.items():
        wanted[field] = {**wanted[field], **value} if field in ("env", "labels") and field in wanted else value
    with client_of(context.instance) as client:
        before = next((one for one in client.services() if one.name == wanted["name"] and not one.removed), None)
        if before is not None and "replicas" not in late:
            wanted["replicas"] = max(before.replicas, 1)
        view = client.deploy(wanted)
        what = "deployed" if before is None else "rolled" if view.generation != before.generation else "as it was"
        context.log.info(f"Service {view.name}: {what}, version {view.generation}; waiting for {view.replicas} ready replica(s).")
        return service_metadata(client.wait_service(view.name, timeout_s))


def service_metadata(view: ServiceView) -> dict[str, MetadataValue]:
    """Where the replicas answer, and how many there are."""
    rows = "".join(
        f"| {replica.task} | {replica.node or ''} | {replica.url or ''} | {'yes' if replica.ready else 'no'} |\n"
        for replica in view.replica_list
    )
    urls = [replica.url for replica in view.replica_list if replica.ready and replica.url]
    return {
        "crater/service": MetadataValue.text(view.name),
        "crater/version": MetadataValue.int(view.generation),
        "crater/replicas": MetadataValue.int(view.replicas),
        "crater/ready": MetadataValue.int(view.ready),
        "crater/urls": MetadataValue.json(urls),
        "crater/replica_list": MetadataValue.md(f"| task | node | address | ready |\n|---|---|---|---|\n{rows}"),
        **{f"crater/url_{number}": MetadataValue.url(url) for number, url in enumerate(urls[:10], 1)},
    }
