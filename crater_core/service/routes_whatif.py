"""Dry runs over HTTP: what would become of tasks, without submitting them."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from crater_core.model.snapshot import still_of
from crater_core.service.http import Hub, Invalid, answer, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.simulation.future import Verdict, what_if
from crater_core.wire.base import ReasonView
from crater_core.wire.tasks import TaskBatch
from crater_core.wire.whatif import DryRun, PlaceView, VerdictView

DRY_RUN_MAX = 1_000


class WhatIfRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tasks"])
        said = described("What would become of them, without submitting", DryRun, takes=TaskBatch)
        router.add_api_route("/v1/tasks:dry-run", self.dry_run, methods=["POST"], **said)
        return router

    async def dry_run(self, request: Request) -> Response:
        who = identity_of(request)
        body = await body_of(request, TaskBatch)
        for task in body.tasks:
            who.must_reach(task.project)
        if len(body.tasks) > DRY_RUN_MAX:
            raise Invalid(f"a dry run takes {DRY_RUN_MAX} tasks at most, found {len(body.tasks)}", field="tasks")
        specs = [task.to_spec(who.user) for task in body.tasks]
        still = still_of(self._engine.shown.snapshot)
        verdicts: tuple[Verdict, ...] = await self._engine.read(what_if, still, specs, self._engine.clock.now_ms())
        views = [_view(spec.name, verdict) for spec, verdict in zip(specs, verdicts, strict=True)]
        return answer(DryRun(revision=still.revision, verdicts=views))


def _view(name: str, verdict: Verdict) -> VerdictView:
    if verdict.refusal is not None:
        refusal = verdict.refusal
        return VerdictView(name=name, outcome="refused", field=refusal.field, reason=ReasonView.of(refusal.reason))
    outcome = "placed" if verdict.placements else "preempting" if verdict.victims else "waiting"
    return VerdictView(
        name=name,
        outcome=outcome,
        reason=ReasonView.of(verdict.reason),
        places=[PlaceView.of(placement) for placement in verdict.placements],
        victims=list(verdict.victims),
        expected_start_ms=verdict.expected.at_ms,
        expected_sure=verdict.expected.sure,
        expected_note=verdict.expected.why,
    )
