"""What a run or a step may ask of Crater, in layers: launcher < code location < executor < run tags < op tags < run config.

Pure: dictionaries in, one dictionary or one checked `TaskSubmission` out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from crater_core.client.bodies import body_of
from crater_core.errors import InvalidRequest
from crater_core.wire.tasks import TaskSubmission

PREFIX = "crater/"
RESOURCES = ("cpu", "memory", "disk", "gpu", "gpu_memory", "gpu_devices", "gpu_type", "mig_profile")
_SHARES = ("gpu", "gpu_memory", "gpu_devices", "mig_profile")
_MAPPINGS = ("env", "node_labels", "prefer_labels", "data_bytes", "labels")
_OBJECTS = ("resources", "on_oom", *_MAPPINGS)
_LISTS = ("pools", "mounts")
GANG = ("members", "members_min", "members_max", "spread")
"""Of the program that a step starts through Pipes: a step itself, and a run, is one process."""
_NUMBERS = ("priority", "ports", "members", "members_min", "members_max")
_OWN = ("python", "run_on", "warm")
"""Options of the plug-in; every other one is a field of the task."""
OPTIONS = (
    "project",
    "priority",
    "pools",
    "quota_policy",
    "strategy",
    "time_limit",
    "checkpoint_every",
    "gpu_idle_stop",
    "gpu_visible_devices",
    "grace",
    "env_profile",
    "env",
    "image",
    "mounts",
    "shared_memory",
    "working_dir",
    "node_labels",
    "prefer_labels",
    "data_bytes",
    "labels",
    "anti_affinity",
    "on_disconnect",
    "on_oom",
    "ports",
    "resources",
    *GANG,
    *_OWN,
)
NOTES = ("failure_reason", "failed_step")
"""Tags under `crater/` that the plug-in writes itself."""
RUN_ON = ("control", "compute")

Options = Mapping[str, Any]


def merge(*layers: Options) -> dict[str, Any]:
    """Later layers win, resource by resource, variable by variable. A higher layer's GPUs replace a lower layer's."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is None:
                continue
            if name == "resources":
                merged[name] = _over(merged.get(name, {}), value)
            elif name in _MAPPINGS:
                merged[name] = {**merged.get(name, {}), **value}
            else:
                merged[name] = value
    return merged


def _over(lower: Mapping[str, Any], higher: Mapping[str, Any]) -> dict[str, Any]:
    higher = {name: value for name, value in higher.items() if value is not None}
    kept = {} if not any(name in higher for name in _SHARES) else dict.fromkeys(_SHARES)
    merged = {**{name: value for name, value in lower.items() if name not in kept}, **higher}
    if not any(merged.get(name) for name in ("gpu", "gpu_memory", "mig_profile")):
        # A layer below may name a default type for those that do ask for a GPU.
        merged.pop("gpu_type", None)
    return merged


def from_tags(tags: Mapping[str, str]) -> dict[str, Any]:
    """The options in `crater/...` tags. Raises InvalidRequest that names the tag."""
    found: dict[str, Any] = {}
    for tag, text in tags.items():
        if not tag.startswith(PREFIX):
            continue
        name = tag.removeprefix(PREFIX)
        if name in NOTES:
            continue
        if name not in OPTIONS:
            raise InvalidRequest(f"{tag}: no such tag; there are {', '.join(PREFIX + one for one in OPTIONS)}", field=tag)
        found[name] = _value(tag, name, text)
    return found


def _value(tag: str, name: str, text: str) -> Any:
    if name in (*_OBJECTS, *_LISTS):
        try:
            value: Any = json.loads(text)
        except ValueError:
            value = None
        wanted = list if name in _LISTS else dict
        if not isinstance(value, wanted):
            what = "a list" if wanted is list else "an object"
            raise InvalidRequest(f"{tag} must be {what} in JSON, found {text[:200]!r}; crater_tags(...) writes it", field=tag)
        return value
    if name in _NUMBERS:
        if not text.strip().isdecimal():
            bounds = " from 0 to 100" if name == "priority" else ""
            raise InvalidRequest(f"{tag} must be a whole number{bounds}, found {text[:50]!r}", field=tag)
        return int(text)
    return text


def to_tags(options: Options) -> dict[str, str]:
    """As `crater/...` tags, which are texts."""
    return {
        PREFIX + name: json.dumps(value, sort_keys=True) if name in (*_OBJECTS, *_LISTS) else str(value)
        for name, value in options.items()
        if value not in (None, {}, [], ())
    }


def submission(options: Options, **task: Any) -> TaskSubmission:
    """The task that merged options stand for; `task` are its further fields. Raises InvalidRequest that names the option."""
    own = {name: value for name, value in options.items() if name not in _OWN}
    if not own.get("image"):
        # A default for those that run in an image.
        own.pop("shared_memory", None)
    env = {**own.pop("env", {}), **task.pop("env", {})}
    labels = {**own.pop("labels", {}), **task.pop("labels", {})}
    more = own.pop("on_oom", None)
    if more:
        own["retry"] = {**own.get("retry", {}), "on_oom": more}
    check_run_on(options)
    return body_of(TaskSubmission, {**own, **task, "env": env, "labels": labels})


def of_one_process(options: Options) -> dict[str, Any]:
    """Without what is meant for the program that a step starts."""
    return {name: value for name, value in options.items() if name not in GANG}


def check_run_on(options: Options) -> str:
    wanted = str(options.get("run_on", RUN_ON[0]))
    if wanted not in RUN_ON:
        raise InvalidRequest(f"run_on must be one of {', '.join(RUN_ON)}, found {wanted!r}", field="run_on")
    return wanted


def pools_of(pool: str | Sequence[str] | None) -> list[str] | None:
    return None if pool is None else [pool] if isinstance(pool, str) else list(pool)
