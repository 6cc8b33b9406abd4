"""Configuration schemas that the launcher, the executor and the code location share, and the client they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any as AnyValue

from dagster import Any, Array, DagsterInvalidConfigError, DagsterRun, Field, IntSource, Map, Permissive, StringSource

from crater_core.client import CraterClient
from crater_dagster._dagster import code_location_layer, process_config
from crater_dagster.options import RESOURCES, Options, from_tags

GROUP_PREFIX = "dagster-run:"


def _optional(kind: AnyValue, description: str) -> Field:
    return Field(kind, is_required=False, description=description)


CONNECTION_FIELDS = {
    "endpoint": _optional(StringSource, "The scheduler's URL, or several with commas. Default: CRATER_ENDPOINT."),
    "token": _optional(StringSource, "Best as {env: NAME}. Default: CRATER_TOKEN, or the file that CRATER_TOKEN_FILE names."),
}
AMOUNT_FIELDS = {name: _optional(Any, 'A number, or a text with its unit: 0.5, "4GiB".') for name in RESOURCES}
OPTION_FIELDS = {
    "project": _optional(StringSource, "Who is charged."),
    "priority": _optional(IntSource, "0 is last, 100 is first."),
    "pools": _optional(Array(StringSource), "Pools to take from."),
    "quota_policy": _optional(StringSource, "The quota policy to count under."),
    "strategy": _optional(StringSource, "How a node is chosen."),
    "time_limit": _optional(StringSource, 'Stopped after this long: "30m", "2h".'),
    "checkpoint_every": _optional(StringSource, 'It saves its work so often: "10m"; "0s": when told to stop.'),
    "gpu_idle_stop": _optional(StringSource, 'Stopped when none of its GPUs was used for this long: "30m".'),
    "gpu_visible_devices": _optional(StringSource, "CUDA_VISIBLE_DEVICES by uuid (default) or index."),
    "grace": _optional(StringSource, "From SIGTERM to SIGKILL."),
    "env_profile": _optional(StringSource, "Variables that the node adds (DAGSTER_HOME, secrets), by the profile's name."),
    "env": _optional(Map(str, StringSource), "Plain variables. Secrets belong to an env_profile."),
    "image": _optional(StringSource, "A container image, for nodes that run them."),
    "mounts": _optional(Array(Permissive()), "Paths of the node to show: {source, target, read_only}."),
    "shared_memory": _optional(StringSource, "Size of a container's /dev/shm."),
    "python": _optional(StringSource, "The workers' Python: a program on the node's PATH, or a path. Default: python."),
    "warm": _optional(StringSource, "on (default): workers start as forks of a process that has imported their code; off: cold."),
    "working_dir": _optional(StringSource, "The workers' working directory."),
    "node_labels": _optional(Map(str, StringSource), "Labels that a node must have."),
    "prefer_labels": _optional(Map(str, StringSource), "Labels that are liked in a node, not demanded."),
    "labels": _optional(Map(str, StringSource), "Labels of the task itself, for whoever looks at it."),
    "anti_affinity": _optional(StringSource, "no, prefer, require: no node where another task of the run is."),
    "on_disconnect": _optional(StringSource, "stop, keep: what a node does that is cut off from the scheduler."),
    "on_oom": _optional(Permissive(), "{factor, memory_max, gpu_memory_max}: run again with more memory after running out."),
    "resources": _optional(AMOUNT_FIELDS, "What a task asks for where nothing else says so."),
}
RUN_FIELDS = {
    "run_on": _optional(
        StringSource,
        "control (default): a run worker only drives steps, and starts at once on a node's control share. "
        "compute: it runs the steps itself, and queues for the resources of its run tags.",
    ),
}


def make_client(config: Options, retry_for_s: float = 30.0, timeout_s: float = 10.0) -> CraterClient:
    """A client that connects when it is first used."""
    return CraterClient.from_env(config.get("endpoint"), config.get("token"), retry_for_s=retry_for_s, timeout_s=timeout_s)


def group_of(run_id: str) -> str:
    """All tasks of one run."""
    return GROUP_PREFIX + run_id


def code_location_options(run: DagsterRun) -> dict[str, AnyValue]:
    """The code location's image and its container context's `crater` key. Raises DagsterInvalidConfigError."""
    image, context = code_location_layer(run)
    given: Mapping[str, AnyValue] = context.get("crater", {})
    checked = process_config({**OPTION_FIELDS, **RUN_FIELDS}, given)
    if not checked.success or checked.value is None:
        raise DagsterInvalidConfigError("Errors in the container context's key `crater`", checked.errors or [], given)
    return {**({"image": image} if image else {}), **checked.value}


def run_options(run: DagsterRun) -> dict[str, AnyValue]:
    """What the run's own tags ask for. Raises InvalidRequest that names the tag."""
    return from_tags(run.tags)


def options_in(config: Options) -> dict[str, AnyValue]:
    """The task options of a launcher's or an executor's configuration."""
    return {name: config[name] for name in (*OPTION_FIELDS, *RUN_FIELDS) if config.get(name) is not None}
