"""`PipesCraterClient`: an external program on allocated compute, its messages, output and figures in the run."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dagster import (
    AssetExecutionContext,
    OpExecutionContext,
    PipesClient,
    PipesClientCompletedInvocation,
    PipesEnvContextInjector,
    open_pipes_session,
)

from crater_core.client import CraterClient
from crater_core.errors import Conflict, CraterError
from crater_core.wire.tasks import TaskSubmission, TaskView
from crater_dagster._dagster import (
    DagsterExecutionInterruptedError,
    DagsterPipesExecutionError,
    TreatAsResourceParam,
    find_launch,
    forget_messages,
    record_launch,
    settle_writers,
)
from crater_dagster.config import group_of
from crater_dagster.connect import client_of, link_to
from crater_dagster.moving import is_being_moved
from crater_dagster.options import GANG, from_tags, merge, pools_of, submission
from crater_dagster.owner import owner_label
from crater_dagster.pipes_context import in_parts, is_too_large
from crater_dagster.pipes_gang import GangOutput
from crater_dagster.pipes_reader import TaskOutputReader
from crater_dagster.reasons import figures, how_it_ended, sentence, why_it_waits

Context = OpExecutionContext | AssetExecutionContext
INHERITED = ("project", "priority", "quota_policy", *GANG)
"""What a task takes over from the tags of the step that starts it."""
OUTPUT_S = 60.0
UNREACHABLE_S = 900.0
PART_OF_THE_STEP = "crater/role"


class PipesCraterClient(PipesClient, TreatAsResourceParam):
    """Runs programs as Crater tasks. `defaults` are options as for `run`, for every call.

    Without `endpoint` and `token` it uses the run launcher's, else CRATER_ENDPOINT and CRATER_TOKEN.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None, **defaults: Any) -> None:
        self._connection = {"endpoint": endpoint, "token": token}
        self._defaults = defaults
        self._mine: set[str] = set()

    @classmethod
    def _is_dagster_maintained(cls) -> bool:
        return False

    def run(  # type: ignore[override]
        self,
        *,
        context: Context,
        command: str | Sequence[str] = (),
        image: str | None = None,
        resources: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        extras: Mapping[str, Any] | None = None,
        name: str | None = None,
        pool: str | Sequence[str] | None = None,
        expect_messages: bool = True,
        **options: Any,
    ) -> PipesClientCompletedInvocation:
        """Run a program on a node, and wait for it.

        `command` is a program with its arguments (one text is a program without); `resources` as in `crater_tags`: `cpu`,
        `memory`, `gpu`, ...; `options` are further fields of a task: `project`, `priority`, `quota_policy`, `time_limit`,
        `env_profile`, `working_dir`, `mounts`, `node_labels`, `members`, `retry`, ... Messages that the program reports by
        `open_dagster_pipes()` and its output come into the run as they are written. Raises DagsterPipesExecutionError with
        the reason when it fails, and when it ends without having closed Pipes; `expect_messages=False` is for a program that
        does not use Pipes. A step that is started again finds the program where it is, if it still runs or has succeeded.
        """
        if self._defaults:
            options = {**self._defaults, **options}
        wanted = merge(
            {name: value for name, value in _step_options(context).items() if name in INHERITED},
            {**options, "image": image or options.get("image"), "pools": pools_of(pool) or options.get("pools")},
            {"resources": {**options.get("resources", {}), **(resources or {})}, "env": dict(env or {})},
        )
        program = [command] if isinstance(command, str) else list(command)
        members = int(wanted.get("members_max") or wanted.get("members") or 1)
        reader = TaskOutputReader(members)
        with open_pipes_session(context, PipesEnvContextInjector(), reader, dict(extras or {})) as session:
            task = self._task(context, wanted, program, dict(session.get_bootstrap_env_vars()), name)
            mark = _fingerprint({**wanted, "command": program, "extras": dict(extras or {})})
            with client_of(context.instance, self._connection, retry_for_s=UNREACHABLE_S) as client:
                first = self._launch(client, context, task, mark)
                try:
                    last = self._follow(client, context, first, reader, members)
                except DagsterExecutionInterruptedError:
                    self._interrupted(client, context, first)
                    raise
            settle_writers(session.message_handler)
            self._judge(context, last, session.message_handler, mark, expect_messages)
        return PipesClientCompletedInvocation(session, metadata=figures(last, link_to(context.instance, client, last.id)))

    # Start, or find what an earlier attempt of the step has started

    def _task(
        self, context: Context, wanted: Mapping[str, Any], program: list[str], pipes: dict[str, str], name: str | None
    ) -> TaskSubmission:
        wanted, task_type = dict(wanted), "training" if wanted.get("resources", {}).get("gpu") else "batch"
        if is_too_large(pipes):
            if wanted.get("image"):
                raise DagsterPipesExecutionError(
                    "the Pipes context is larger than the 128 KiB that a container can be given: pass less in `extras`"
                )
            pipes, program = in_parts(pipes, program, wanted.get("python", "python"))
        step_key = _step_key(context)
        env = {"PYTHONUNBUFFERED": "1", **wanted.pop("env", {}), **pipes}
        return submission(
            {"type": task_type, **wanted},
            name=(name or step_key)[:200],
            command=tuple(program),
            env=env,
            group=group_of(context.run.run_id),
            labels={
                PART_OF_THE_STEP: "pipes",
                "dagster/run_id": context.run.run_id,
                "dagster/step_key": step_key[:1000],
                **owner_label(context.instance),
            },
        )

    def _launch(self, client: CraterClient, context: Context, task: TaskSubmission, mark: str) -> TaskView:
        found = find_launch(context)
        if found is not None and found[0] not in self._mine:
            earlier = self._earlier(client, found[0])
            if earlier is not None and found[1].get("mark") == mark and not found[1].get("spent") and _usable(earlier):
                context.log.info(f"Reattached to task {earlier.id}, which is {earlier.status}.")
                record_launch(context, earlier.id, {"mark": mark})
                self._mine.add(earlier.id)
                return earlier
            if earlier is not None and not earlier.ended:
                client.cancel(earlier.id, "the step that started it has begun again, with another request")
        key = f"{context.run.run_id}:pipes:{mark[:32]}:{context.retry_number}:{len(self._mine)}"
        try:
            view = client.submit(task, idempotency_key=key)
            if view.ended:
                view = client.submit(task, idempotency_key=uuid.uuid4().hex)
        except Conflict:
            view = client.submit(task, idempotency_key=uuid.uuid4().hex)
        record_launch(context, view.id, {"mark": mark})
        self._mine.add(view.id)
        return view

    def _earlier(self, client: CraterClient, task_id: str) -> TaskView | None:
        try:
            return client.task(task_id)
        except CraterError:
            return None

    # While it runs

    def _follow(self, client: CraterClient, context: Context, view: TaskView, reader: TaskOutputReader, members: int) -> TaskView:
        output = GangOutput(client, members, reader.handler.handle_message, lambda: self._begin_again(context, reader))
        output.start()
        told: str | None = None
        try:
            while True:
                output.heard(view)
                told = _tell(context, view, told)
                if view.ended:
                    break
                view = client.task(view.id, after=view.revision, wait_s=25.0)
            for problem in output.finish(OUTPUT_S):
                context.log.warning(f"The output of task {view.id}: {problem}")
        finally:
            output.close()
        return view

    def _begin_again(self, context: Context, reader: TaskOutputReader) -> None:
        context.log.info("The task runs again: what it has reported so far does not count.")
        forget_messages(reader.handler)

    def _interrupted(self, client: CraterClient, context: Context, view: TaskView) -> None:
        """A person has ended the run, or this process is only being moved: then the program goes on, and is found again."""
        if is_being_moved(context.instance, context.run.run_id):
            context.log.info(f"Interrupted; task {view.id} goes on.")
            return
        client.cancel(view.id, "the step that started it was interrupted")
        context.log.info(f"Interrupted; task {view.id} was told to stop.")

    # After its end

    def _judge(self, context: Context, view: TaskView, handler: Any, mark: str, expect_messages: bool) -> None:
        if view.status != "succeeded":
            raise DagsterPipesExecutionError(how_it_ended(view))
        if handler.received_closed_message or (not expect_messages and not handler.received_opened_message):
            return
        record_launch(context, view.id, {"mark": mark, "spent": True})
        if handler.received_opened_message:
            raise DagsterPipesExecutionError(
                f"Task {view.id} on node {view.node} ended with exit code 0, but without closing Dagster Pipes: what it "
                "reported may not be all. It should leave `with open_dagster_pipes()` before it ends."
            )
        raise DagsterPipesExecutionError(
            f"Task {view.id} on node {view.node} ended with exit code 0, but never opened Dagster Pipes. "
            "Use `with open_dagster_pipes()` in the program, or pass expect_messages=False."
        )


def _tell(context: Context, view: TaskView, told: str | None) -> str | None:
    code = why_it_waits(view)
    if code is not None and code != told:
        context.log.info(f"Task {view.id} waits: {sentence(view.reason)}")
        return code
    where = f"{view.attempt} {view.node}"
    if view.status == "running" and told != where:
        context.log.info(f"Task {view.id} runs on node {view.node}.")
        return where
    return told


def _usable(view: TaskView) -> bool:
    return (not view.ended and not view.cancelling) or view.status == "succeeded"


def _step_key(context: Context) -> str:
    return context.get_step_execution_context().step.key


def _step_options(context: Context) -> dict[str, Any]:
    return merge(from_tags(context.run.tags), from_tags(context.get_step_execution_context().step.tags or {}))


def _fingerprint(asked: Mapping[str, Any]) -> str:
    """Equal when the same is asked for again."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
