"""`crater doctor`: what is wrong, on this node or with the scheduler's side, and the fix for each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from crater_core import __version__
from crater_core.cli.session import USAGE, Json, client, err, option
from crater_core.cli.show import clean, now_ms, short
from crater_core.errors import CraterError
from crater_core.findings import Finding, tell
from crater_core.model.reason import ReasonCode

if TYPE_CHECKING:
    from crater_core.client import CraterClient
    from crater_core.wire.nodes import NodeView
    from crater_core.wire.tasks import TaskView

NODE_PROGRAM = "crater_agent"
"""Run, never imported: the core knows no agent."""
LATE_MS = 15_000
STARTING_MS_MAX = 60_000
TASKS_MAX = 2_000
SHOWN_MAX = 5
HOPELESS = {
    ReasonCode.NO_NODE_READY,
    ReasonCode.LABELS_MISMATCH,
    ReasonCode.GPU_TYPE_MISSING,
    ReasonCode.MPS_ONE_GPU,
    ReasonCode.POOL_MISSING,
    ReasonCode.RUNTIME_MISSING,
}
"""Waiting alone will not help."""


def doctor(
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the scheduler's side: store, leader, late nodes, stuck tasks.")
    ] = False,
    config: Annotated[Path | None, option("FILE", "The node's agent.yaml.", "--config")] = None,
    image: Annotated[str | None, option("IMAGE", "Also run nvidia-smi in a container of this image.", "--image")] = None,
    as_json: Json = False,
) -> int:
    """Check this node, or the cluster, and say the fix for each thing that is wrong.

    [bold]crater doctor[/]  [dim]this node: driver, device files, containers, cgroups, disk, scheduler, clock, port[/]

    [bold]crater doctor --cluster[/]  [dim]the scheduler's side, from anywhere[/]

    The exit code is 1 when a check fails.
    """
    if cluster:
        return tell(_examine(), as_json, "The cluster")
    if importlib.util.find_spec(NODE_PROGRAM) is None:
        err().print(
            "crater: this machine is no node (no agent is installed); `crater doctor --cluster` checks the scheduler's side"
        )
        return USAGE
    command = [sys.executable, "-m", NODE_PROGRAM, "doctor"]
    command += ["--config", str(config)] if config is not None else []
    command += ["--image", image] if image is not None else []
    return subprocess.run([*command, *(["--json"] if as_json else [])], check=False).returncode


def _examine() -> Iterator[Finding]:
    with client() as crater:
        try:
            health = crater.health()
        except CraterError as error:
            fix = "start crater-scheduler, or point CRATER_ENDPOINT at it: docs/install.md"
            yield Finding.failed("scheduler", f"{', '.join(crater.endpoints)}: {error.message}", fix)
            return
        if health.version != __version__:
            fix = "install the same version on both sides"
            yield Finding.warned("scheduler", f"version {health.version}; this command is {__version__}", fix)
        else:
            yield Finding.passed("scheduler", f"{', '.join(crater.endpoints)}, version {health.version}")
        if health.status == "ok":
            yield Finding.passed("store", f"takes writes, revision {health.revision}")
        else:
            fix = "see that the database or its disk is there; what runs goes on, nothing new is decided"
            yield Finding.failed("store", f"{health.status}, last revision {health.revision}", fix)
        if health.leader:
            yield Finding.passed("leader", f"term {health.term}")
        else:
            yield Finding.failed(
                "leader", "no scheduler leads", "look at the logs of all schedulers: one must take over in seconds"
            )
        try:
            yield from _nodes(crater.nodes())
            yield from _tasks(crater)
        except CraterError as error:
            yield Finding.failed("access", error.message, "set CRATER_TOKEN: `crater-scheduler token new NAME --role viewer`")


def _nodes(nodes: list[NodeView]) -> Iterator[Finding]:
    if not nodes:
        yield Finding.warned(
            "nodes", "none has registered", "start crater-agent on one; `crater doctor` there says what hinders it"
        )
        return
    lost = [f"{clean(node.name)} ({short(node.heartbeat_age_ms)})" for node in nodes if node.status != "ready"]
    late = [
        f"{clean(node.name)} ({short(node.heartbeat_age_ms)})"
        for node in nodes
        if node.status == "ready" and node.heartbeat_age_ms > LATE_MS
    ]
    if lost:
        yield Finding.failed("nodes", f"lost: {_some(lost)}", "`crater doctor` on it; `systemctl status crater-agent`")
    if late:
        yield Finding.warned("nodes", f"late: {_some(late)}", "look at its load and at the network between")
    if not lost and not late:
        yield Finding.passed("nodes", f"{len(nodes)} heard from in the last {LATE_MS // 1000} s")
    yield from _odd(nodes)


def _odd(nodes: list[NodeView]) -> Iterator[Finding]:
    watched = [clean(node.name) for node in nodes if node.enforcement == "watched"]
    if watched:
        yield Finding.warned("limits", f"watched, not held: {_some(watched)}", "`crater nodes show NODE` says why")
    cordoned = [clean(node.name) for node in nodes if node.cordoned]
    if cordoned:
        yield Finding.warned("cordoned", _some(cordoned), "`crater nodes uncordon NODE` when it may take tasks again")
    unwell = [f"{clean(node.name)} {device.index}" for node in nodes for device in node.devices if not device.healthy]
    if unwell:
        yield Finding.warned(
            "GPUs", f"set aside as unwell: {_some(unwell)}", "`nvidia-smi -q` and `dmesg | grep -i xid` on the node"
        )
    versions = Counter(node.agent_version for node in nodes)
    if set(versions) - {__version__}:
        told = ", ".join(f"{count} of {version or 'unknown'}" for version, count in versions.most_common())
        yield Finding.warned(
            "versions", f"agents: {told}; this is {__version__}", "update the agents: their tasks go on meanwhile"
        )


def _tasks(crater: CraterClient) -> Iterator[Finding]:
    waiting = list(crater.tasks(status=["queued"], limit=TASKS_MAX))
    hopeless = [task for task in waiting if task.reason is not None and task.reason.code in HOPELESS]
    slow = [task for task in crater.tasks(status=["allocated"], limit=TASKS_MAX) if _on_its_way_ms(task) > STARTING_MS_MAX]
    if slow:
        named = [f"{task.id} on {clean(task.node or '?')}" for task in slow]
        fix = "look at the agent's log there; an image may still be on its way"
        yield Finding.warned("stuck tasks", f"placed for more than a minute and not running: {_some(named)}", fix)
    for code, count in Counter(task.reason.code for task in hopeless if task.reason).most_common():
        first = next(task for task in hopeless if task.reason and task.reason.code == code)
        assert first.reason is not None
        saw = f"{count} wait for what waiting does not bring, such as {first.id}: {first.reason.message}"
        yield Finding.warned("stuck tasks", saw, first.reason.next_step or f"`crater explain {first.id}`")
    if not slow and not hopeless:
        yield Finding.passed("tasks", f"{len(waiting)} wait for room or quota, none is stuck")


def _on_its_way_ms(task: TaskView) -> int:
    return now_ms() - task.submitted_at_ms - task.waited_ms


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(names[:SHOWN_MAX]) + more
