"""A snapshot without what is nobody else's to read: all that decisions need stays, what tasks run and with which values goes."""

from __future__ import annotations

from dataclasses import replace

from crater_core.model.allocation import Allocation
from crater_core.model.node import Node
from crater_core.model.reason import Reason
from crater_core.model.runtimes import RunTimes
from crater_core.model.service import Service
from crater_core.model.snapshot import Snapshot, copy_of
from crater_core.model.task import Task, TaskSpec

COMMAND = ("scrubbed",)
IMAGE = "scrubbed"
_FACTS_KEPT = {"by", "holder", "policy", "project", "reservation", "resource"}
"""Facts in words that decisions or their readers need; others may repeat what a program or an engine said."""


def scrubbed(snapshot: Snapshot) -> Snapshot:
    """A snapshot of its own that gives the same plan: without commands, environments, images, mounts, paths, labels of tasks,
    addresses of nodes and words of programs. Names of tasks, projects, users and nodes stay.
    """
    twin = copy_of(snapshot)
    twin.run_times = RunTimes()  # What is foretold of a queued task stands in the task.
    twin.advance([_task(task) for task in snapshot.tasks.values()])
    twin.advance([_allocation(allocation) for allocation in snapshot.allocations.values()])
    twin.advance([_node(node) for node in snapshot.nodes.values()])
    twin.advance([replace(reservation, why="") for reservation in snapshot.reservations.values()])
    twin.advance([_service(service) for service in snapshot.services.values()])
    return twin


def _spec(spec: TaskSpec) -> TaskSpec:
    return replace(
        spec,
        command=COMMAND,
        image=None if spec.image is None else IMAGE,
        env={},
        env_profile=None,
        working_dir=None,
        warm_preload=None,
        mounts=(),
        output_path=None,
        labels={},
        health=None,
    )


def _task(task: Task) -> Task:
    return replace(
        task,
        spec=_spec(task.spec),
        reason=_reason(task.reason),
        cancel_reason=_reason(task.cancel_reason),
        fault=_reason(task.fault),
    )


def _allocation(allocation: Allocation) -> Allocation:
    return replace(allocation, reason=_reason(allocation.reason), token=0)


def _node(node: Node) -> Node:
    drain = None if node.drain is None else replace(node.drain, why="")
    return replace(node, address="", agent_url="", boot_id="", notes=(), drain=drain)


def _service(service: Service) -> Service:
    return replace(service, template=_spec(service.template))


def _reason(reason: Reason | None) -> Reason | None:
    if reason is None:
        return None
    facts = {name: fact if isinstance(fact, int) or name in _FACTS_KEPT else "..." for name, fact in reason.facts.items()}
    return Reason(reason.code, facts)
