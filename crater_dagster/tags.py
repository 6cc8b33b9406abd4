"""`crater_tags(...)`: what an op or an asset asks of Crater, checked where it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster import DagsterInvalidDefinitionError

from crater_core.errors import InvalidRequest
from crater_dagster.options import pools_of, submission, to_tags

Number = int | float | str


def crater_tags(
    *,
    cpu: Number | None = None,
    memory: Number | None = None,
    disk: Number | None = None,
    gpu: Number | None = None,
    gpu_memory: Number | None = None,
    gpu_devices: int | None = None,
    gpu_type: str | Sequence[str] | None = None,
    mig_profile: str | None = None,
    pool: str | Sequence[str] | None = None,
    project: str | None = None,
    priority: int | None = None,
    quota_policy: str | None = None,
    strategy: str | None = None,
    time_limit: Number | None = None,
    checkpoint_every: Number | None = None,
    gpu_idle_stop: Number | None = None,
    gpu_visible_devices: str | None = None,
    grace: Number | None = None,
    node_labels: Mapping[str, str] | None = None,
    prefer_labels: Mapping[str, str] | None = None,
    data_bytes: Mapping[str, Number] | None = None,
    labels: Mapping[str, str] | None = None,
    anti_affinity: str | None = None,
    on_disconnect: str | None = None,
    on_oom: float | Mapping[str, Number] | None = None,
    ports: int | None = None,
    members: int | None = None,
    members_min: int | None = None,
    members_max: int | None = None,
    spread: str | None = None,
    env_profile: str | None = None,
    env: Mapping[str, str] | None = None,
    image: str | None = None,
    mounts: Sequence[Mapping[str, object]] | None = None,
    shared_memory: Number | None = None,
    python: str | None = None,
    working_dir: str | None = None,
    run_on: str | None = None,
) -> dict[str, str]:
    """Tags for `op_tags=` of an asset, `tags=` of an op or a job, or `tags=` of a run.

    Amounts are written as people write them: `cpu=2`, `memory="4GiB"`, `gpu=1` for a whole device, `gpu=0.25` or
    `gpu_memory="10GiB"` for a share of one, `time_limit="2h"`. `gpu=1, gpu_type="a100 or 3g.40gb"` takes a card or a MIG slice.
    What is not given comes from the executor's and the run launcher's configuration. `env` is for plain settings: secrets
    belong to an `env_profile`, which stays on the node.
    `on_oom=1.5` has the scheduler run a step that ran out of memory again with that many times as much, which uses no retry of
    the step; `{"factor": 2, "memory_max": "64GiB"}` bounds it. `data_bytes` says by node how much of the input lies there.
    `members`, `members_min`, `members_max` and `spread` are for the program that the step starts through Pipes; the step
    itself stays one process. Raises DagsterInvalidDefinitionError that names the argument.
    """
    types = gpu_type if isinstance(gpu_type, str) or gpu_type is None else list(gpu_type)
    resources = {
        "cpu": cpu,
        "memory": memory,
        "disk": disk,
        "gpu": gpu,
        "gpu_memory": gpu_memory,
        "gpu_devices": gpu_devices,
        "gpu_type": types,
        "mig_profile": mig_profile,
    }
    options = {
        "resources": {name: value for name, value in resources.items() if value is not None},
        "pools": pools_of(pool),
        "project": project,
        "priority": priority,
        "quota_policy": quota_policy,
        "strategy": strategy,
        "time_limit": time_limit,
        "checkpoint_every": checkpoint_every,
        "gpu_idle_stop": gpu_idle_stop,
        "gpu_visible_devices": gpu_visible_devices,
        "grace": grace,
        "node_labels": dict(node_labels) if node_labels else None,
        "prefer_labels": dict(prefer_labels) if prefer_labels else None,
        "data_bytes": dict(data_bytes) if data_bytes else None,
        "labels": dict(labels) if labels else None,
        "anti_affinity": anti_affinity,
        "on_disconnect": on_disconnect,
        "on_oom": on_oom if on_oom is None or isinstance(on_oom, Mapping) else {"factor": on_oom},
        "ports": ports,
        "members": members,
        "members_min": members_min,
        "members_max": members_max,
        "spread": spread,
        "env_profile": env_profile,
        "env": dict(env) if env else None,
        "image": image,
        "mounts": [dict(mount) for mount in mounts] if mounts else None,
        "shared_memory": shared_memory,
        "python": python,
        "working_dir": working_dir,
        "run_on": run_on,
    }
    given = {name: value for name, value in options.items() if value not in (None, {}, [])}
    try:
        submission(given, name="check", command=("true",))
    except InvalidRequest as error:
        message = error.message.removeprefix("resources.").removeprefix("resources: ").removeprefix("retry.")
        message = message.replace("pools", "pool", 1) if message.startswith("pools") else message
        raise DagsterInvalidDefinitionError(f"crater_tags: {message}{_found(error)}") from None
    return to_tags(given)


def _found(error: InvalidRequest) -> str:
    found = error.fields.get("found")
    return f" (found {found!r})" if found is not None and repr(found) not in error.message else ""
