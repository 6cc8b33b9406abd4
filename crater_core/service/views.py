"""The committed state as wire messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace

from crater_core.errors import NotFound
from crater_core.lifecycle.tasks import may_run_elsewhere
from crater_core.model.allocation import Allocation
from crater_core.model.task import TaskStatus
from crater_core.scheduling import borrowed, device_use, free_amounts, pool_overview, project_shares, quota_use
from crater_core.service.engine import Engine
from crater_core.store.protocol import StoredTask
from crater_core.wire.agents import lease_of
from crater_core.wire.nodes import LimitsView, NodeView, PoolView, QuotaView, node_view
from crater_core.wire.resources import AmountsView
from crater_core.wire.services import ReplicaView, ServiceView, replica_view, service_view
from crater_core.wire.tasks import TaskView, task_view
from crater_core.wire.usage import SharePage, ShareView

_PAUSE_EVERY = 100


async def find_task(engine: Engine, task_id: str) -> StoredTask:
    """From memory when it lives or has just ended, else from the store. Raises NotFound."""
    record = engine.shown.record(task_id)
    if record is not None:
        return record.stored()
    stored: StoredTask | None = await engine.read(engine.store.task, task_id)
    if stored is None:
        raise NotFound(f"no task has the id {task_id[:200]}", task=task_id[:200])
    return stored


def show_task(engine: Engine, stored: StoredTask) -> TaskView:
    """With the newest numbers of its reason and of its use."""
    task = stored.task
    queued = task.status is TaskStatus.QUEUED
    allocations: Iterable[Allocation] = () if queued else stored.allocations
    if not task.status.ended:
        allocations = [_with_use(engine, allocation) for allocation in allocations]
    reason = engine.shown.reasons.get(task.id) if queued else None
    return task_view(task, tuple(allocations), reason=reason, now_ms=engine.clock.now_ms(), revision=stored.revision)


async def task_list(engine: Engine, found: Sequence[StoredTask]) -> bytes:
    """Tasks as the inside of a JSON array, with pauses: a long list must not hold up heartbeats."""
    parts: list[bytes] = []
    for index, stored in enumerate(found):
        parts.append(show_task(engine, stored).model_dump_json().encode())
        if index % _PAUSE_EVERY == _PAUSE_EVERY - 1:
            await asyncio.sleep(0)
    return b",".join(parts)


def _with_use(engine: Engine, allocation: Allocation) -> Allocation:
    use = None if allocation.status.ended else engine.heard.use_of(allocation.node, allocation.id)
    return replace(allocation, use=use) if use is not None else allocation


def show_node(engine: Engine, name: str) -> NodeView:
    snapshot = engine.shown.snapshot
    node = snapshot.nodes.get(name)
    if node is None:
        raise NotFound(f"no node is called {name[:200]}", node=name[:200])
    held = snapshot.by_node.get(name, {}).values()
    return node_view(
        node,
        free_amounts(snapshot, name),
        device_use(snapshot, name),
        allocations=len(held),
        control_used=sum(allocation.control for allocation in held),
        heartbeat_age_ms=engine.heard.age_ms(name),
    )


def show_pools(engine: Engine) -> list[PoolView]:
    return [
        PoolView(
            name=pool.name,
            kind=pool.kind.value,
            strategy=pool.strategy,
            nodes=list(pool.nodes),
            capacity=AmountsView.of(pool.capacity),
            free=AmountsView.of(pool.free),
            devices=pool.devices,
            devices_free=pool.devices_free,
        )
        for pool in pool_overview(engine.shown.snapshot)
    ]


def show_quotas(engine: Engine) -> list[QuotaView]:
    snapshot = engine.shown.snapshot
    uses = quota_use(snapshot)
    return [
        QuotaView(
            name=name,
            projects=list(policy.projects),
            limits=LimitsView.of(policy.limits),
            user_limits=LimitsView.of(policy.user_limits),
            guarantee=LimitsView.of(policy.guarantee),
            lend=policy.lend,
            borrowed=AmountsView.of(borrowed(uses[name].used, policy.guarantee)),
            used=AmountsView.of(uses[name].used),
            used_by_user={user: AmountsView.of(amounts) for user, amounts in sorted(uses[name].by_user.items())},
        )
        for name, policy in sorted(snapshot.policies.items())
    ]


def show_shares(engine: Engine) -> SharePage:
    """The smaller share first, as the queue sees it."""
    snapshot = engine.shown.snapshot
    shares = project_shares(snapshot, engine.clock.now_ms())
    return SharePage(
        half_life_ms=snapshot.settings.fair_share_half_life_ms,
        shares=[
            ShareView(
                project=project,
                weight_milli=share.weight_milli,
                held=AmountsView.of(share.held),
                average=AmountsView.of(share.average),
                held_milli=share.held_milli,
                average_milli=share.average_milli,
                share_milli=share.share_milli,
            )
            for project, share in sorted(shares.items(), key=lambda pair: (pair[1].share_milli, pair[0]))
        ],
    )


def show_service(engine: Engine, name: str) -> ServiceView:
    snapshot = engine.shown.snapshot
    service = snapshot.services.get(name)
    if service is None:
        raise NotFound(f"no service is called {name[:200]}", service=name[:200])
    replicas: list[ReplicaView] = []
    for task_id in sorted(snapshot.by_service.get(name, ())):
        record = engine.shown.records[task_id]
        view = show_task(engine, record.stored())
        node = snapshot.nodes.get(view.node) if view.node else None
        sampled = any(engine.heard.use_of(a.node, a.id) is not None for a in record.allocations.values())
        replicas.append(replica_view(view, node.address if node else None, record.task.spec.service_generation, sampled))
    return service_view(service, replicas)


class LeaseBook:
    """A node's list of leases as bytes. A lease is written once and joined with the others at every answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._written: dict[str, tuple[Allocation, bytes]] = {}

    def list_for(self, node: str) -> bytes:
        snapshot = self._engine.shown.snapshot
        parts: list[bytes] = []
        for allocation in snapshot.by_node.get(node, {}).values():
            known = self._written.get(allocation.id)
            if known is None or known[0] is not allocation:
                task = snapshot.tasks[allocation.task]
                restartable = may_run_elsewhere(snapshot.settings, task)
                known = (allocation, lease_of(task, allocation, restartable).model_dump_json().encode())
                self._written[allocation.id] = known
            parts.append(known[1])
        if len(self._written) > 2 * len(snapshot.allocations) + 1000:
            self._written = {name: known for name, known in self._written.items() if name in snapshot.allocations}
        head = f'{{"revision":{snapshot.revision},"term":{snapshot.term},"leases":['
        return head.encode() + b",".join(parts) + b"]}"
