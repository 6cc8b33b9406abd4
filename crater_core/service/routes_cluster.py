"""The cluster over HTTP: nodes, pools, quota policies, usage, health."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from crater_core import __version__
from crater_core.errors import Conflict, NotFound
from crater_core.lifecycle.inputs import Input, NodeCordoned, NodeDrained, PolicyRemoved, PolicySet
from crater_core.model.node import NodeStatus
from crater_core.model.snapshot import Snapshot
from crater_core.service.http import Hub, Invalid, answer, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.service.usage_report import live_records, usage_report
from crater_core.service.views import show_node, show_pools, show_quotas, show_shares
from crater_core.wire.nodes import DrainBody, NodePage, NodeView, PoolPage, QuotaBody, QuotaPage, QuotaView
from crater_core.wire.usage import Health, LeaderView, SharePage, UsageReport

_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Time = Annotated[int | None, Query(ge=0, le=2**62)]


class ClusterRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["cluster"])
        add = router.add_api_route
        add("/v1/nodes", self.nodes, methods=["GET"], **described("All nodes", NodePage))
        add("/v1/nodes/{name}", self.node, methods=["GET"], **described("A node", NodeView))
        add("/v1/nodes/{name}/cordon", self.cordon, methods=["POST"], **described("Take nothing new", NodeView))
        add("/v1/nodes/{name}/drain", self.drain, methods=["POST"], **described("Empty it", NodeView, takes=DrainBody))
        add("/v1/nodes/{name}/uncordon", self.uncordon, methods=["POST"], **described("Take tasks again", NodeView))
        add("/v1/pools", self.pools, methods=["GET"], **described("Pools, gathered over the nodes", PoolPage))
        add("/v1/quotas", self.quotas, methods=["GET"], **described("Quota policies with their use", QuotaPage))
        add("/v1/quotas/{name}", self.quota, methods=["GET"], **described("A quota policy", QuotaView))
        add("/v1/quotas/{name}", self.set_quota, methods=["PUT"], **described("Create or change it", QuotaView, takes=QuotaBody))
        add("/v1/quotas/{name}", self.remove_quota, methods=["DELETE"], **described("Remove it", None, 204))
        add("/v1/shares", self.shares, methods=["GET"], **described("What projects hold, now and lately", SharePage))
        add("/v1/usage", self.usage, methods=["GET"], **described("Hours held in a window", UsageReport))
        add("/v1/leader", self.leader, methods=["GET"], **described("Who leads", LeaderView))
        add("/ready", self.ready, methods=["GET"], **described("Able to serve, as leader or standby", Health, also=(503,)))
        add("/health", self.health, methods=["GET"], **described("Alive, and able to decide", Health))
        return router

    async def nodes(self) -> Response:
        return answer(NodePage(nodes=[show_node(self._engine, name) for name in sorted(self._engine.shown.snapshot.nodes)]))

    async def node(self, name: str) -> Response:
        return answer(show_node(self._engine, name))

    async def cordon(self, request: Request, name: str) -> Response:
        return await self._set_cordon(request, name, True)

    async def uncordon(self, request: Request, name: str) -> Response:
        return await self._set_cordon(request, name, False)

    async def _set_cordon(self, request: Request, name: str, cordoned: bool) -> Response:
        who = identity_of(request)
        who.must_be_admin()
        return await self._of_node(name, NodeCordoned(name, cordoned, who.user))

    async def drain(self, request: Request, name: str) -> Response:
        who = identity_of(request)
        who.must_be_admin()
        body = await body_of(request, DrainBody)
        deadline_ms = None if body.deadline is None else self._engine.clock.now_ms() + body.deadline
        return await self._of_node(name, NodeDrained(name, deadline_ms, who.user, body.reason))

    async def _of_node(self, name: str, happened: Input) -> Response:
        def must_exist(snapshot: Snapshot) -> None:
            if name not in snapshot.nodes:
                raise NotFound(f"no node is called {name[:200]}", node=name[:200])

        await self._engine.happen(happened, check=must_exist)
        return answer(show_node(self._engine, name))

    async def pools(self) -> Response:
        return answer(PoolPage(pools=show_pools(self._engine)))

    async def quotas(self) -> Response:
        return answer(QuotaPage(quotas=show_quotas(self._engine)))

    async def quota(self, name: str) -> Response:
        for view in show_quotas(self._engine):
            if view.name == name:
                return answer(view)
        raise NotFound(f"no quota policy is called {name[:200]}", quota_policy=name[:200])

    async def set_quota(self, request: Request, name: str) -> Response:
        identity_of(request).must_be_admin()
        if not _SLUG.fullmatch(name):
            raise Invalid("a policy's name has 1 to 100 letters, digits, dots, dashes and underscores", field="name")
        body = await body_of(request, QuotaBody)
        await self._engine.happen(PolicySet(body.to_policy(name)))
        return await self.quota(name)

    async def remove_quota(self, request: Request, name: str) -> Response:
        identity_of(request).must_be_admin()

        def must_be_free(snapshot: Snapshot) -> None:
            if name not in snapshot.policies:
                raise NotFound(f"no quota policy is called {name[:200]}", quota_policy=name[:200])
            users = [task.id for task in snapshot.tasks.values() if task.spec.quota_policy == name]
            users += [service.name for service in snapshot.services.values() if service.template.quota_policy == name]
            if users:
                raise Conflict(f"{len(users)} live task(s) and service(s) name this policy, first {users[0]}", users=len(users))

        await self._engine.happen(PolicyRemoved(name), check=must_be_free)
        return Response(status_code=204)

    async def shares(self) -> Response:
        return answer(show_shares(self._engine))

    async def usage(
        self,
        from_ms: Time = None,
        to_ms: Time = None,
        by: Literal["project", "user", "quota_policy", "node", "task", "name"] = "project",
    ) -> Response:
        engine = self._engine
        now_ms = engine.clock.now_ms()
        begin, end = from_ms or 0, now_ms if to_ms is None else to_ms
        if begin >= end:
            raise Invalid("from_ms must be before to_ms", field="from_ms")
        live = live_records(engine.shown.snapshot, now_ms)
        closed = await engine.read(engine.store.usage, begin, end)
        return answer(await engine.read(usage_report, [*closed, *live], by, begin, end))

    async def leader(self) -> Response:
        engine = self._engine
        url = engine.own_url if engine.leading else engine.leader_url
        revision = engine.shown.revision
        return answer(LeaderView(leader=url or None, leading=engine.leading, term=engine.term, revision=revision))

    async def ready(self) -> Response:
        health = self._health()
        serves = health.status == "ok" and (health.leader or bool(self._engine.leader_url))
        return answer(health, 200 if serves else 503)

    async def health(self) -> Response:
        return answer(self._health())

    def _health(self) -> Health:
        snapshot = self._engine.shown.snapshot
        return Health(
            status="ok" if self._engine.why_not_writable() is None else "store_unavailable",
            version=__version__,
            leader=self._engine.leading and not self._engine.stale.is_set(),
            revision=snapshot.revision,
            term=self._engine.term,
            nodes_ready=sum(node.status is NodeStatus.READY for node in snapshot.nodes.values()),
            tasks_queued=len(snapshot.queued),
            tasks_running=len(snapshot.tasks) - len(snapshot.queued),
        )
