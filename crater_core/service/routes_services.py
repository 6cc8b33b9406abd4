"""Services over HTTP: deploy, scale, show, remove."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import Conflict, NotFound
from crater_core.lifecycle.inputs import Input, ServiceDeployed, ServiceRemoved, ServiceScaled
from crater_core.model.service import Service
from crater_core.service.auth import Identity
from crater_core.service.batch import Batch
from crater_core.service.engine import Prepared
from crater_core.service.http import Hub, Invalid, answer, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.service.submits import check_admission
from crater_core.service.views import show_service
from crater_core.wire.services import ScaleBody, ServiceBody, ServicePage, ServiceView


class ServiceRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["services"], prefix="/v1/services")
        add = router.add_api_route
        add("", self.list_services, methods=["GET"], **described("All services", ServicePage))
        add("/{name}", self.show, methods=["GET"], **described("A service with its replicas", ServiceView))
        add("/{name}", self.deploy, methods=["PUT"], **described("Deploy, or roll", ServiceView, 200, ServiceBody, also=(201,)))
        add("/{name}/scale", self.scale, methods=["POST"], **described("Set the replicas", ServiceView, takes=ScaleBody))
        add("/{name}", self.remove, methods=["DELETE"], **described("Stop the replicas and remove it", ServiceView))
        return router

    async def list_services(self) -> Response:
        names = sorted(self._engine.shown.snapshot.services)
        return answer(ServicePage(services=[show_service(self._engine, name) for name in names]))

    async def show(self, name: str) -> Response:
        return answer(show_service(self._engine, name))

    async def deploy(self, request: Request, name: str) -> Response:
        who = identity_of(request)
        body = await body_of(request, ServiceBody)
        if body.name != name:
            raise Invalid(f"name must be {name!r} as in the path, found {body.name!r}", field="name")
        who.must_reach(body.project)
        template = body.to_template(who.user)

        def prepare(batch: Batch) -> Prepared:
            known = batch.snapshot.services.get(name)
            if known is not None:
                who.must_reach(known.template.project)
            check_admission(template, batch.snapshot)
            # The same body by another user is no new version: replicas stay with the user they began with.
            kept = replace(template, user=known.template.user) if known is not None else template
            same = known is not None and known.template == kept
            return Prepared([ServiceDeployed(name, kept if same else template, body.replicas)], value=known is None)

        created: bool = (await self._engine.do(prepare)).value
        return answer(show_service(self._engine, name), 201 if created else 200)

    async def scale(self, request: Request, name: str) -> Response:
        who = identity_of(request)
        body = await body_of(request, ScaleBody)

        def prepare(batch: Batch) -> Prepared:
            service = _of_the_caller(batch, who, name)
            if service.removed:
                raise Conflict(f"service {name} is being removed", service=name)
            return Prepared(self._scaled(name, body, who))

        await self._engine.do(prepare)
        return answer(show_service(self._engine, name))

    def _scaled(self, name: str, body: ScaleBody, who: Identity) -> list[Input]:
        by = f"{who.user}: {body.reason}" if body.reason else who.user
        return [ServiceScaled(name, body.replicas, by)]

    async def remove(self, request: Request, name: str) -> Response:
        who = identity_of(request)
        before = show_service(self._engine, name)

        def prepare(batch: Batch) -> Prepared:
            _of_the_caller(batch, who, name)
            return Prepared([ServiceRemoved(name, who.user)])

        await self._engine.do(prepare)
        gone = name not in self._engine.shown.snapshot.services
        return answer(before.model_copy(update={"removed": True}) if gone else show_service(self._engine, name))


def _of_the_caller(batch: Batch, who: Identity, name: str) -> Service:
    service = batch.snapshot.services.get(name)
    if service is None:
        raise NotFound(f"no service is called {name[:200]}", service=name[:200])
    who.must_reach(service.template.project)
    return service
