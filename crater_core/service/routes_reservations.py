"""Advance reservations over HTTP: make, show, cancel."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import Conflict, ImpossibleRequest, NotFound
from crater_core.lifecycle.inputs import ReservationCancelled, ReservationMade
from crater_core.model.reason import Reason, next_step, sentence
from crater_core.model.snapshot import Snapshot
from crater_core.scheduling import find_parts
from crater_core.service.batch import Batch
from crater_core.service.engine import Prepared
from crater_core.service.http import Hub, Invalid, answer, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.wire.reservations import ReservationBody, ReservationPage, ReservationView


class ReservationRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["cluster"], prefix="/v1/reservations")
        add = router.add_api_route
        add("", self.listed, methods=["GET"], **described("What is reserved", ReservationPage))
        add("", self.make, methods=["POST"], **described("Reserve", ReservationView, 201, ReservationBody))
        add("/{name}", self.show, methods=["GET"], **described("A reservation", ReservationView))
        add("/{name}", self.cancel, methods=["DELETE"], **described("Give it up", None, 204))
        return router

    async def listed(self) -> Response:
        now_ms = self._engine.clock.now_ms()
        live = [one for one in self._engine.shown.snapshot.reservations.values() if one.to_ms > now_ms]
        ordered = sorted(live, key=lambda one: (one.from_ms, one.name))
        return answer(ReservationPage(reservations=[ReservationView.of(one, now_ms) for one in ordered]))

    async def show(self, name: str) -> Response:
        return answer(self._view(name))

    async def make(self, request: Request) -> Response:
        who = identity_of(request)
        who.must_be_admin()
        body = await body_of(request, ReservationBody)
        now_ms = self._engine.clock.now_ms()
        wanted = body.to_reservation(body.name or self._engine.ids.new("r"), who.user, now_ms)
        if wanted.to_ms <= max(wanted.from_ms, now_ms):
            field = "duration" if body.duration is not None else "to_ms"
            raise Invalid(
                f"a reservation must end after it begins, and not in the past: from {wanted.from_ms} to {wanted.to_ms}",
                field=field,
            )

        def prepare(batch: Batch) -> Prepared:
            if wanted.name in batch.snapshot.reservations:
                raise Conflict(f"there is a reservation {wanted.name} already", reservation=wanted.name)
            parts = find_parts(batch.snapshot, wanted)
            if isinstance(parts, Reason):
                field = {"gpu": "gpus"}.get(str(parts.facts["resource"]), str(parts.facts["resource"]))
                raise ImpossibleRequest(sentence(parts), field=field, next_step=next_step(parts), **parts.facts)
            return Prepared([ReservationMade(replace(wanted, parts=parts))])

        await self._engine.do(prepare)
        return answer(self._view(wanted.name), 201)

    async def cancel(self, request: Request, name: str) -> Response:
        who = identity_of(request)
        who.must_be_admin()

        def must_exist(snapshot: Snapshot) -> None:
            if name not in snapshot.reservations:
                raise NotFound(f"no reservation is called {name[:200]}", reservation=name[:200])

        await self._engine.happen(ReservationCancelled(name, who.user), check=must_exist)
        return Response(status_code=204)

    def _view(self, name: str) -> ReservationView:
        found = self._engine.shown.snapshot.reservations.get(name)
        if found is None:
            raise NotFound(f"no reservation is called {name[:200]}", reservation=name[:200])
        return ReservationView.of(found, self._engine.clock.now_ms())
