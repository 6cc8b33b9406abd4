"""What agents call: register, take their leases, report, and be heard."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import Conflict, NotFound
from crater_core.lifecycle.inputs import Input, NodeCordoned, NodeDrained, NodeHeard, NodeRegistered, Report
from crater_core.model.node import Node, NodeStatus
from crater_core.model.snapshot import Snapshot
from crater_core.service.batch import Batch
from crater_core.service.engine import Prepared
from crater_core.service.http import Hub, Invalid, answer, answer_bytes, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.service.routes_tasks import Wait
from crater_core.service.views import LeaseBook
from crater_core.wire.agents import (
    DrainAnswer,
    DrainAsked,
    Heartbeat,
    HeartbeatAnswer,
    Leases,
    NodeDeclaration,
    Registered,
    ReportAnswer,
    ReportBatch,
)

_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class AgentRoutes:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._engine = hub.engine
        self._leases = LeaseBook(hub.engine)

    def router(self) -> APIRouter:
        router = APIRouter(tags=["agents"], prefix="/v1/agents/{node}")
        add = router.add_api_route
        add("/register", self.register, methods=["POST"], **described("Declare a node", Registered, takes=NodeDeclaration))
        add("/leases", self.leases, methods=["GET"], **described("The whole list of leases, or wait for it to change", Leases))
        add(
            "/reports", self.reports, methods=["POST"], **described("What became of allocations", ReportAnswer, takes=ReportBatch)
        )
        add("/heartbeat", self.heartbeat, methods=["POST"], **described("Alive, with use", HeartbeatAnswer, takes=Heartbeat))
        add("/drain", self.drain, methods=["POST"], **described("Empty this node", DrainAnswer, takes=DrainAsked))
        add("/drain", self.draining, methods=["GET"], **described("Whether it is being emptied", DrainAnswer))
        add("/undrain", self.undrain, methods=["POST"], **described("Take tasks again", DrainAnswer))
        return router

    async def register(self, request: Request, node: str) -> Response:
        if not _NODE_NAME.fullmatch(node):
            raise Invalid("a node's name has 1 to 100 letters, digits, dots, dashes and underscores", field="node")
        self._engine.must_lead()
        body = await body_of(request, NodeDeclaration)
        if body.agent_url and not body.agent_url.startswith(("http://", "https://")):
            raise Invalid("agent_url must be an http or https URL", field="agent_url")
        declared = body.to_node(node)
        await self._engine.happen(NodeRegistered(declared), check=lambda snapshot: _devices_are_its_own(snapshot, declared))
        self._engine.heard.registered(node, body.agent_secret)
        return answer(
            Registered(
                term=self._engine.term,
                heartbeat_interval_ms=self._hub.heartbeat_interval_ms,
                heartbeat_timeout_ms=self._hub.heartbeat_timeout_ms,
                server_time_ms=self._engine.clock.now_ms(),
            )
        )

    async def _heard(self, name: str) -> None:
        """Any call of a node is a sign of life. Raises NotFound for one that has to register first."""
        if not self._engine.leading:
            self._engine.must_lead()
        known = self._engine.shown.snapshot.nodes.get(name)
        if name not in self._engine.heard.secrets or known is None:
            raise NotFound(f"node {name[:100]} has not registered with this scheduler since it started", node=name[:100])
        self._engine.heard.hear(name)
        self._engine.must_lead()  # Heard all the same: what the store does is no node's fault.
        if self._engine.counts_as_lost(name):
            await self._engine.happen(NodeHeard(name))

    async def drain(self, request: Request, node: str) -> Response:
        """Without a deadline: nothing that runs is stopped for it. An operator's own drain of it stays as it is."""
        body = await body_of(request, DrainAsked)
        known = self._engine.shown.snapshot.nodes.get(node)
        if known is None or known.drain is None:
            await self._happen(node, NodeDrained(node, None, identity_of(request).user, body.reason))
        return await self.draining(node)

    async def undrain(self, request: Request, node: str) -> Response:
        await self._happen(node, NodeCordoned(node, False, identity_of(request).user))
        return await self.draining(node)

    async def draining(self, node: str) -> Response:
        self._engine.must_lead()
        snapshot = self._engine.shown.snapshot
        _must_exist(snapshot, node)
        return answer(
            DrainAnswer(draining=snapshot.nodes[node].drain is not None, allocations=len(snapshot.by_node.get(node, ())))
        )

    async def _happen(self, name: str, happened: Input) -> None:
        """Said by the machine, and perhaps not by its agent: no sign of life."""
        await self._engine.happen(happened, check=lambda snapshot: _must_exist(snapshot, name))

    async def leases(self, node: str, after: Annotated[int | None, Query(ge=0, le=2**62)] = None, wait: Wait = 0.0) -> Response:
        await self._heard(node)
        engine = self._engine
        until_ms = engine.clock.monotonic_ms() + round(wait * 1000)
        while after is not None and engine.shown.leases_changed_at(node) <= after <= engine.shown.revision:
            if not await engine.bell.wait(("node", node), (until_ms - engine.clock.monotonic_ms()) / 1000):
                break
        engine.must_lead()
        engine.heard.hear(node)
        return answer_bytes(self._leases.list_for(node))

    async def reports(self, request: Request, node: str) -> Response:
        await self._heard(node)
        body = await body_of(request, ReportBatch)
        now_ms = self._engine.clock.now_ms()

        def prepare(batch: Batch) -> Prepared:
            unknown = [report.allocation for report in body.reports if report.allocation not in batch.snapshot.allocations]
            inputs = [
                Report(
                    node=node,
                    allocation=report.allocation,
                    token=report.token,
                    status=report.status,
                    at_ms=now_ms,
                    reason=report.reason.to_reason() if report.reason else None,
                    exit_code=report.exit_code,
                    use=report.use.to_use() if report.use else None,
                    ready=report.ready,
                )
                for report in body.reports
            ]
            return Prepared(inputs, value=unknown)

        work = await self._engine.do(prepare)
        refused = [report.allocation for report, refusal in zip(body.reports, work.refusals, strict=True) if refusal]
        return answer(ReportAnswer(stale=list(dict.fromkeys([*work.value, *refused]))))

    async def heartbeat(self, request: Request, node: str) -> Response:
        await self._heard(node)
        body = await body_of(request, Heartbeat, b"{}")
        self._engine.heard.used(node, {name: use.to_use() for name, use in body.uses.items()})
        return answer(HeartbeatAnswer(term=self._engine.term, server_time_ms=self._engine.clock.now_ms()))


def _must_exist(snapshot: Snapshot, name: str) -> None:
    if name not in snapshot.nodes:
        raise NotFound(f"no node is called {name[:200]}", node=name[:200])


def _devices_are_its_own(snapshot: Snapshot, declared: Node) -> None:
    """Two nodes with one device would both give it out: most likely one machine with two names."""
    uuids = {device.uuid for device in declared.devices}
    if len(uuids) < len(declared.devices):
        raise Invalid("each device may be declared once", field="devices")
    for other in snapshot.nodes.values():
        if (
            other.name != declared.name
            and other.status is NodeStatus.READY
            and not uuids.isdisjoint(d.uuid for d in other.devices)
        ):
            raise Conflict(
                f"node {other.name} has declared one of these devices already; stop its agent, or give the devices other ids",
                field="devices",
                node=other.name,
            )
