"""`crater_executor`: each step is a task with its own request; the loop wakes on the scheduler's events."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dagster import DagsterInstance, DagsterRun, Field, IntSource, MetadataValue, StringSource, executor

from crater_core.errors import CraterError, InvalidRequest
from crater_core.model.units import parse_duration_ms
from crater_core.wire.tasks import TaskView
from crater_dagster._dagster import (
    CheckStepHealthResult,
    DagsterEvent,
    EngineEventData,
    Executor,
    InitExecutorContext,
    RetryMode,
    StepDelegatingExecutor,
    StepDependencyConfig,
    StepHandler,
    StepHandlerContext,
    events_after,
    executing_as,
    get_retries_config,
    get_step_dependency_config_field,
    get_tag_concurrency_limits_config,
    has_final_event,
    keep_steps_when,
    multiple_process_executor_requirements,
    report_step_event,
    retry_number,
    step_fields,
    writes_in_turn,
)
from crater_dagster.config import CONNECTION_FIELDS, OPTION_FIELDS, code_location_options, group_of, options_in, run_options
from crater_dagster.connect import client_of, launcher_of, link_to
from crater_dagster.following import ROLE, STEP_WORKER
from crater_dagster.moving import steps_go_on
from crater_dagster.options import from_tags, merge, of_one_process, submission
from crater_dagster.owner import owner_label
from crater_dagster.payload import pack
from crater_dagster.reasons import FAILED_STEP_TAG, FAILURE_TAG, failure_code, figures, how_it_ended, sentence, why_it_waits
from crater_dagster.resuming import ResumableExecution
from crater_dagster.run_events import RunEvents
from crater_dagster.shipping import ship, tell_problems
from crater_dagster.steps import POLL_S, Key, StepTask, StepTasks
from crater_dagster.story import last_lines, why_queued_again
from crater_dagster.warm import preload_of

HEALTH_CHECK_S = 20
IDLE_SLEEP_S = 0.05


@executor(
    name="crater",
    config_schema={
        **CONNECTION_FIELDS,
        **OPTION_FIELDS,
        "retries": get_retries_config(),
        "max_concurrent": Field(IntSource, is_required=False, description="How many steps of one run are asked for at once."),
        "tag_concurrency_limits": get_tag_concurrency_limits_config(),
        "step_dependency_config": get_step_dependency_config_field(),
        "per_step": Field(
            dict,
            is_required=False,
            description="Options for single steps, by step key or op name; they win over everything else.",
        ),
        "poll_interval": Field(
            StringSource,
            is_required=False,
            description="The longest the loop waits for an event before it looks. Default: 500ms.",
        ),
        "unreachable_grace": Field(
            StringSource,
            is_required=False,
            description="How long a step may wait for a scheduler that does not answer. Default: 15m.",
        ),
    },
    requirements=multiple_process_executor_requirements(),
)
def crater_executor(init_context: InitExecutorContext) -> Executor:
    """Runs each step of a job as a Crater task, with the request in its op tags (see `crater_tags`).

    Options come in layers, the last one wins: run launcher, code location (`crater` in its container context), this
    executor's configuration, the run's tags, the op's tags, `per_step` in the run's configuration.
    """
    config: dict[str, Any] = dict(init_context.executor_config)
    return CraterExecutor(
        CraterStepHandler(config),
        retries=RetryMode.from_config(config["retries"]) or RetryMode.ENABLED,
        max_concurrent=config.get("max_concurrent"),
        tag_concurrency_limits=config.get("tag_concurrency_limits"),
        step_dependency_config=StepDependencyConfig.from_config(config.get("step_dependency_config")),
    )


class CraterExecutor(StepDelegatingExecutor):
    """Dagster's own step-delegating loop, except that it waits for events and looks at a step as soon as its task has ended."""

    def __init__(self, handler: CraterStepHandler, **options: Any) -> None:
        self._handler = handler
        self._events: RunEvents | None = None
        self._idle_turns = 0
        super().__init__(handler, sleep_seconds=IDLE_SLEEP_S, check_step_health_interval_seconds=HEALTH_CHECK_S, **options)

    # The loop reads these two in every turn.

    @property
    def _sleep_seconds(self) -> float:
        """Waiting for events is the loop's sleep. It needs one of its own only while nothing is in flight, and not in the first
        turn of that kind, which may be the run's last.
        """
        return IDLE_SLEEP_S if self._idle_turns > 1 and not self._handler.in_flight else 0.0

    @_sleep_seconds.setter
    def _sleep_seconds(self, value: float) -> None:
        pass

    @property
    def _check_step_health_interval_seconds(self) -> int:
        return 0 if self._handler.unsettled else HEALTH_CHECK_S

    @_check_step_health_interval_seconds.setter
    def _check_step_health_interval_seconds(self, value: int) -> None:
        pass

    def _pop_events(self, instance: DagsterInstance, run_id: str, seen_storage_ids: set[int]) -> Sequence[DagsterEvent]:
        self._handler.follow()
        if self._events is None:
            self._events = RunEvents(partial(events_after, instance, run_id), writes_in_turn(instance))
        found = [event for event in self._events.new() if self._handler.take_in(event)]
        self._idle_turns = 0 if self._handler.in_flight else self._idle_turns + 1
        return found

    def execute(self, plan_context: Any, execution_plan: Any) -> Generator[DagsterEvent, Any, None]:
        instance, run = plan_context.instance, plan_context.dagster_run
        keep_steps_when(instance, lambda dagster_says, run_id: steps_go_on(instance, run_id, dagster_says))
        self._handler.begin(instance, run, plan_context.resume_from_failure)
        try:
            with executing_as(ResumableExecution):
                yield from super().execute(plan_context, execution_plan)
        finally:
            self._handler.finish()


class CraterStepHandler(StepHandler):
    """Turns one run's steps into tasks, and what becomes of the tasks into lines of the run's event log."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._poll_s = parse_duration_ms(config.get("poll_interval", f"{round(POLL_S * 1000)}ms"), "poll_interval") / 1000
        self._grace_s = parse_duration_ms(config.get("unreachable_grace", "15m"), "unreachable_grace") / 1000
        self._told: dict[Key, str] = {}
        self._later: list[tuple[str, str, dict[str, MetadataValue]]] = []
        self._outputs: set[tuple[str, str, str | None]] = set()
        self._told_away = False
        self._failed: dict[str, str] = {}
        """Short reasons of steps that failed just now; whether they are retried is the retry policy's to say."""

    @property
    def name(self) -> str:
        return "crater"

    def begin(self, instance: DagsterInstance, run: DagsterRun, resumed: bool) -> None:
        self._instance, self._run = instance, run
        launcher = launcher_of(instance)
        self._base = merge(
            launcher.options if launcher else {}, code_location_options(run), options_in(self._config), run_options(run)
        )
        self._labels = {ROLE: STEP_WORKER, "dagster/run_id": run.run_id, **owner_label(instance)}
        self._client = client_of(instance, self._config, retry_for_s=0.0, timeout_s=5.0)
        self._tasks = StepTasks(self._client, group_of(run.run_id), self._labels, self._tell)
        if resumed:
            with client_of(instance, self._config, retry_for_s=self._grace_s) as patient:
                self._tasks.find_earlier(patient)

    # Dagster's three questions

    def launch_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        step_key, key = _keys(step_handler_context)
        known = self._tasks.get(key)
        if known is not None and not known.ended:
            yield self._starting(step_handler_context, step_key, f"Step {step_key} goes on as the task it was.")
            return
        try:
            self._submit(step_handler_context, step_key, key)
        except (CraterError, ValueError) as error:
            self._tasks.refuse(key, error if isinstance(error, CraterError) else InvalidRequest(str(error)))
        yield self._starting(step_handler_context, step_key, f"Step {step_key} is handed to the scheduler.")

    def check_step_health(self, step_handler_context: StepHandlerContext) -> CheckStepHealthResult:
        step_key, key = _keys(step_handler_context)
        task = self._tasks.get(key)
        if task is None:
            return CheckStepHealthResult.unhealthy(f"no task of the scheduler is attempt {key[1] + 1} of step {step_key}")
        if not task.ended:
            if task.view is None and self._tasks.unreachable_s() > self._grace_s:
                return CheckStepHealthResult.unhealthy(f"it could not be submitted: {self._tasks.unreachable}")
            return CheckStepHealthResult.healthy()
        task.settled = True
        if has_final_event(self._instance, self._run.run_id, step_key):
            return CheckStepHealthResult.healthy()
        self._failed[step_key] = failure_code(task.reason)
        return CheckStepHealthResult.unhealthy(self._why_it_failed(task))

    def terminate_step(self, step_handler_context: StepHandlerContext) -> Iterator[DagsterEvent]:
        step_key, key = _keys(step_handler_context)
        try:
            self._tasks.cancel(key, "Dagster asked for it")
            message = f"The task of step {step_key} was told to stop."
        except CraterError as error:
            message = f"The task of step {step_key} could not be told to stop: {error.message}"
        yield DagsterEvent.engine_event(step_handler_context.get_step_context(step_key), message, EngineEventData())

    # The loop's further needs

    @property
    def in_flight(self) -> bool:
        return self._tasks.in_flight()

    @property
    def unsettled(self) -> bool:
        return self._tasks.unsettled()

    def follow(self) -> None:
        """Wait until a task of the run has changed, for a bounded time."""
        self._say_later()
        self._tasks.follow(0.0 if self._tasks.unsettled() else self._poll_s)
        if bool(self._tasks.unreachable) is not self._told_away:
            self._told_away = bool(self._tasks.unreachable)
            why = f"No scheduler answers ({self._tasks.unreachable}). Steps that run go on; new ones wait."
            self._say(None, why if self._told_away else "The scheduler answers again.", {})

    def take_in(self, event: DagsterEvent) -> bool:
        """False for an output that an attempt before this one (preempted, or on a lost node) has reported already."""
        if event.step_key is None:
            return True
        if event.is_step_success or event.is_step_failure or event.is_step_up_for_retry:
            self._tasks.settle(event.step_key)
            why = self._failed.pop(event.step_key, None)
            if why is not None and event.is_step_failure:
                self._instance.add_run_tags(self._run.run_id, {FAILURE_TAG: why, FAILED_STEP_TAG: event.step_key})
            if event.is_step_up_for_retry:
                self._outputs = {output for output in self._outputs if output[0] != event.step_key}
        if event.is_successful_output:
            handle = event.step_output_data.step_output_handle
            output = (handle.step_key, handle.output_name, handle.mapping_key)
            if output in self._outputs:
                return False
            self._outputs.add(output)
        return True

    def finish(self) -> None:
        if hasattr(self, "_client"):
            for key, view in self._tasks.ending():
                ship(self._instance, self._run.run_id, key[0], view.id, None)
            self._say_later()
            self._client.close()

    # What a step asks for

    def _submit(self, context: StepHandlerContext, step_key: str, key: Key) -> None:
        tags = from_tags(context.step_tags[step_key])
        options = of_one_process(merge(self._base, tags, self._per_step(step_key)))
        task = submission(
            options,
            name=step_key[:200],
            command=(options.get("python", "python"), "-m", "crater_dagster.worker", "step"),
            env=pack(step_fields(context.execute_step_args)),
            warm_preload=preload_of(self._run, options),
            group=group_of(self._run.run_id),
            labels={
                **self._labels,
                "dagster/step_key": step_key[:1000],
                "dagster/retry": str(key[1]),
                "dagster/job": self._run.job_name[:1000],
            },
        )
        launch = self._tasks.launches.get(key, 0)
        self._tasks.put(key, task, f"{self._run.run_id}:step:{_short(step_key)}:{key[1]}:{launch}")

    def _per_step(self, step_key: str) -> Mapping[str, Any]:
        chosen: Mapping[str, Any] = self._config.get("per_step") or {}
        return chosen.get(step_key) or chosen.get(step_key.partition("[")[0]) or {}

    def _starting(self, context: StepHandlerContext, step_key: str, message: str) -> DagsterEvent:
        return DagsterEvent.step_worker_starting(context.get_step_context(step_key), message, {})

    # What is told

    def _tell(self, key: Key, view: TaskView, before: TaskView | None) -> None:
        moved = before is not None and before.allocation != view.allocation
        if before is not None and before.allocation and moved and not before.ended:
            ship(self._instance, self._run.run_id, key[0], before.id, before.allocation)
            if view.attempt > before.attempt or not view.ended:
                self._say_why_again(key, view)
        if view.ended:
            if view.allocation and (before is None or not before.ended):
                ship(self._instance, self._run.run_id, key[0], view.id, view.allocation)
            if before is None or not before.ended:
                self._later.append((key[0], how_it_ended(view), self._figures(view)))
            return
        code = why_it_waits(view)
        if code is not None and code != self._told.get(key):
            self._told[key] = code
            self._say(key[0], f"Step {key[0]} waits: {sentence(view.reason)}", self._where(view))
        where = f"{view.attempt} {view.node}"
        if view.node is not None and view.status == "running" and self._told.get(key) != where:
            self._told[key] = where
            self._later.append((key[0], f"Step {key[0]} runs on node {view.node} as task {view.id}.", self._figures(view)))

    def _say_why_again(self, key: Key, view: TaskView) -> None:
        """An attempt was ended that was not the step's fault. By now the next one may run already, so that only the task's
        history knows why."""
        why = why_queued_again(self._client, view.id)
        if why is not None:
            self._told[key] = why.code
        self._say(key[0], f"Step {key[0]} was stopped and is queued again: {sentence(why)}", self._figures(view))

    def _figures(self, view: TaskView) -> dict[str, MetadataValue]:
        return figures(view, link_to(self._instance, self._client, view.id))

    def _where(self, view: TaskView) -> dict[str, MetadataValue]:
        link = link_to(self._instance, self._client, view.id)
        return {"crater/task": MetadataValue.text(view.id), "crater/link": MetadataValue.url(link)}

    def _say(self, step_key: str | None, message: str, metadata: Mapping[str, MetadataValue]) -> None:
        report_step_event(self._instance, self._run, step_key, message, metadata)

    def _say_later(self) -> None:
        """What nobody waits for is written while the loop would sleep."""
        while self._later:
            self._say(*self._later.pop(0))
        tell_problems(self._instance, self._run)

    def _why_it_failed(self, task: StepTask) -> str:
        if task.view is None:
            return sentence(task.reason)
        how = how_it_ended(task.view)
        if task.view.status == "succeeded":
            return f"its process ended without saying how the step ended. {how}"
        if task.view.reason is not None and task.view.reason.code in ("exit_code", "signalled", "exit_unknown", "start_failed"):
            return "\n".join([how, *last_lines(self._client, task.view.id)])
        return how


def _keys(context: StepHandlerContext) -> tuple[str, Key]:
    step_keys = context.execute_step_args.step_keys_to_execute or []
    assert len(step_keys) == 1, "Dagster hands over one step at a time"
    return step_keys[0], (step_keys[0], retry_number(context.execute_step_args, step_keys[0]))


def _short(step_key: str) -> str:
    """Of bounded length, for a key that must fit in a header."""
    if len(step_key) <= 100 and step_key.isascii() and step_key.isprintable():
        return step_key
    return hashlib.sha256(step_key.encode()).hexdigest()[:32]
