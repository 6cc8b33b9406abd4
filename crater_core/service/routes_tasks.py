"""Tasks over HTTP: submit, list, show, wait, explain, cancel."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from crater_core.errors import NotFound
from crater_core.lifecycle.inputs import CancelAsked
from crater_core.model.plan import Explanation
from crater_core.model.snapshot import still_of
from crater_core.model.task import ARRAY_LABEL, TaskStatus
from crater_core.scheduling import explain
from crater_core.service.batch import Batch
from crater_core.service.engine import Prepared
from crater_core.service.http import Hub, Invalid, answer, answer_bytes, body_of, identity_of
from crater_core.service.openapi import described
from crater_core.service.submits import Submission
from crater_core.service.views import find_task, show_task, task_list
from crater_core.simulation.future import Expected, expected_start
from crater_core.store.protocol import StoredTask, TaskFilter
from crater_core.wire.tasks import (
    CancelBody,
    EventPage,
    EventView,
    ExplanationView,
    TaskBatch,
    TaskPage,
    TaskSubmission,
    TaskView,
)

_TASK_ID = re.compile(r"t[0-9a-z]{18}")
_KEY_MAX = 200
Wait = Annotated[float, Query(ge=0, le=60, description="seconds to wait for news")]
Limit = Annotated[int, Query(ge=1, le=1000)]
Text = Annotated[str | None, Query(max_length=1000)]


class TaskRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["tasks"])
        add = router.add_api_route
        key = {
            "Idempotency-Key": "a name of your own for this submit: a repeat gives the same task",
            "Crater-User": "administrators only",
        }
        add(
            "/v1/tasks",
            self.submit,
            methods=["POST"],
            **described("Submit a task", TaskView, 201, TaskSubmission, key, also=(200,)),
        )
        add(
            "/v1/tasks:batch",
            self.submit_batch,
            methods=["POST"],
            **described("Submit many, all or none", TaskPage, 201, TaskBatch),
        )
        add("/v1/tasks", self.list_tasks, methods=["GET"], **described("List tasks, newest first", TaskPage))
        add("/v1/tasks/{task_id}", self.show, methods=["GET"], **described("Show a task, or wait for it to change", TaskView))
        add("/v1/tasks/{task_id}/events", self.events, methods=["GET"], **described("A task's history", EventPage))
        add(
            "/v1/tasks/{task_id}/explain",
            self.explain,
            methods=["GET"],
            **described("Why it waits, node by node", ExplanationView),
        )
        add("/v1/tasks/{task_id}/cancel", self.cancel, methods=["POST"], **described("End a task", TaskView, takes=CancelBody))
        add(
            "/v1/groups/{group:path}/cancel",
            self.cancel_group,
            methods=["POST"],
            **described("End every live task of a group", TaskPage, takes=CancelBody),
        )
        return router

    async def submit(self, request: Request) -> Response:
        who = identity_of(request)
        body = await body_of(request, TaskSubmission)
        who.must_reach(body.project)
        key = checked_key(request.headers.get("idempotency-key"), "Idempotency-Key")
        submission = Submission(self._engine.ids.new("t"), body.to_spec(who.user), key)
        (submitted,) = await self._engine.submit([submission])
        view = show_task(self._engine, await find_task(self._engine, submitted.id))
        return answer(view, 201 if submitted.new else 200)

    async def submit_batch(self, request: Request) -> Response:
        who = identity_of(request)
        body = await body_of(request, TaskBatch)
        for task in body.tasks:
            who.must_reach(task.project)
        keys: tuple[str | None, ...] = body.idempotency_keys or (None,) * len(body.tasks)
        if len(keys) != len(body.tasks):
            raise Invalid("idempotency_keys must have one key for each task", field="idempotency_keys")
        submissions = [
            Submission(self._engine.ids.new("t"), task.to_spec(who.user), checked_key(key, f"idempotency_keys.{index}"))
            for index, (task, key) in enumerate(zip(body.tasks, keys, strict=True))
        ]
        done = await self._engine.submit(submissions)
        return await self._page([await find_task(self._engine, submitted.id) for submitted in done], None, 201)

    async def _page(self, found: list[StoredTask], cursor: str | None, status: int = 200) -> Response:
        tail = f'],"next_cursor":"{cursor}"}}' if cursor else '],"next_cursor":null}'
        return answer_bytes(b'{"tasks":[' + await task_list(self._engine, found) + tail.encode(), status)

    async def list_tasks(
        self,
        status: Annotated[list[TaskStatus] | None, Query()] = None,
        project: Text = None,
        user: Text = None,
        name: Text = None,
        group: Text = None,
        service: Text = None,
        array: Text = None,
        label: Annotated[list[str] | None, Query(description="KEY=VALUE", max_length=20)] = None,
        key: Text = None,
        limit: Limit = 100,
        cursor: Annotated[str | None, Query(max_length=100)] = None,
    ) -> Response:
        if cursor is not None and not _TASK_ID.fullmatch(cursor):
            raise Invalid("cursor must be the next_cursor of an earlier answer", field="cursor")
        labels = _labels(label or []) + (((ARRAY_LABEL, array),) if array is not None else ())
        wanted = TaskFilter(tuple(one.value for one in status or ()), project, user, name, group, service, labels, key)
        found: list[StoredTask] = await self._engine.read(self._engine.store.tasks, wanted, limit + 1, cursor)
        more = found[limit - 1].task.id if len(found) > limit else None
        return await self._page(found[:limit], more)

    async def show(self, task_id: str, wait: Wait = 0.0, after: Annotated[int | None, Query(ge=0, le=2**62)] = None) -> Response:
        engine = self._engine
        stored = await find_task(engine, task_id)
        if wait:
            after = stored.revision if after is None else after
            until_ms = engine.clock.monotonic_ms() + round(wait * 1000)
            while stored.revision == after and not stored.task.status.ended:
                if not await engine.bell.wait(("task", task_id), (until_ms - engine.clock.monotonic_ms()) / 1000):
                    break
                stored = await find_task(engine, task_id)
        return answer(show_task(engine, stored))

    async def events(self, task_id: str, after: Annotated[int, Query(ge=0, le=2**62)] = 0, limit: Limit = 1000) -> Response:
        await find_task(self._engine, task_id)
        store = self._engine.store
        found = await self._engine.read(lambda: store.events(after, limit, subject="task", subject_id=task_id))
        return answer(EventPage(events=[EventView.of(stored.event, stored.sequence) for stored in found]))

    async def explain(self, task_id: str) -> Response:
        engine = self._engine
        stored = await find_task(engine, task_id)
        now_ms = engine.clock.now_ms()
        try:
            explanation = await engine.look(explain, task_id, now_ms)
        except NotFound:  # It has ended.
            stored = await find_task(engine, task_id)
            strategy = stored.task.spec.strategy or engine.settings.strategy
            explanation = Explanation(task_id, strategy, stored.task.reason)
        expected = Expected()
        if stored.task.status is TaskStatus.QUEUED:
            expected = await engine.read(expected_start, still_of(engine.shown.snapshot), task_id, now_ms)
        view = ExplanationView.of(explanation, stored.task.status.value)
        told = {"expected_start_ms": expected.at_ms, "expected_sure": expected.sure, "expected_note": expected.why}
        return answer(view.model_copy(update=told))

    async def cancel(self, request: Request, task_id: str) -> Response:
        who = identity_of(request)
        body = await body_of(request, CancelBody, b"{}")
        stored = await find_task(self._engine, task_id)
        who.must_reach(stored.task.spec.project)
        if not stored.task.status.ended:
            await self._engine.happen(CancelAsked(task_id, who.user, body.reason))
        return answer(show_task(self._engine, await find_task(self._engine, task_id)))

    async def cancel_group(self, request: Request, group: str) -> Response:
        who = identity_of(request)
        body = await body_of(request, CancelBody, b"{}")

        def prepare(batch: Batch) -> Prepared:
            ids = sorted(batch.snapshot.by_group.get(group, ()))
            for task_id in ids:
                who.must_reach(batch.snapshot.tasks[task_id].spec.project)
            return Prepared([CancelAsked(task_id, who.user, body.reason) for task_id in ids], value=ids)

        ids: list[str] = (await self._engine.do(prepare)).value
        return await self._page([await find_task(self._engine, task_id) for task_id in ids], None)


def checked_key(key: str | None, field: str) -> str | None:
    if key is None or (0 < len(key) <= _KEY_MAX and key.isprintable()):
        return key
    raise Invalid(f"an idempotency key has 1 to {_KEY_MAX} printable characters", field=field)


def _labels(given: list[str]) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise Invalid(f"label must be KEY=VALUE, found {text[:100]!r}", field="label")
        pairs.append((name, value))
    return tuple(pairs)
