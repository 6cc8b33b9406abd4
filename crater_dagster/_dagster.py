"""The one door to Dagster's private modules, so that a new release of Dagster is a change in one file.

What only a worker process needs is imported inside functions: the web server and the daemon never pay for it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from dagster import AssetMaterialization, DagsterInstance, DagsterRun, MetadataValue
from dagster._config import process_config as process_config
from dagster._core.definitions.executor_definition import (
    multiple_process_executor_requirements as multiple_process_executor_requirements,
)
from dagster._core.definitions.resource_annotation import TreatAsResourceParam as TreatAsResourceParam
from dagster._core.errors import DagsterExecutionInterruptedError as DagsterExecutionInterruptedError
from dagster._core.errors import DagsterPipesExecutionError as DagsterPipesExecutionError
from dagster._core.events import DagsterEvent as DagsterEvent
from dagster._core.events import DagsterEventType as DagsterEventType
from dagster._core.events import EngineEventData as EngineEventData
from dagster._core.events import RunFailureReason as RunFailureReason
from dagster._core.execution.plan.active import ActiveExecution as ActiveExecution
from dagster._core.execution.plan.active import _pool_key_for_step as pool_of_step  # noqa: F401
from dagster._core.execution.retries import RetryMode as RetryMode
from dagster._core.execution.retries import get_retries_config as get_retries_config
from dagster._core.execution.step_dependency_config import StepDependencyConfig as StepDependencyConfig
from dagster._core.execution.step_dependency_config import get_step_dependency_config_field as get_step_dependency_config_field
from dagster._core.execution.tags import get_tag_concurrency_limits_config as get_tag_concurrency_limits_config
from dagster._core.executor.base import Executor as Executor
from dagster._core.executor.init import InitExecutorContext as InitExecutorContext
from dagster._core.executor.step_delegating import StepDelegatingExecutor as StepDelegatingExecutor
from dagster._core.executor.step_delegating.step_handler.base import CheckStepHealthResult as CheckStepHealthResult
from dagster._core.executor.step_delegating.step_handler.base import StepHandler as StepHandler
from dagster._core.executor.step_delegating.step_handler.base import StepHandlerContext as StepHandlerContext
from dagster._core.launcher.base import CheckRunHealthResult as CheckRunHealthResult
from dagster._core.launcher.base import LaunchRunContext as LaunchRunContext
from dagster._core.launcher.base import ResumeRunContext as ResumeRunContext
from dagster._core.launcher.base import RunLauncher as RunLauncher
from dagster._core.launcher.base import WorkerStatus as WorkerStatus
from dagster._core.storage.compute_log_manager import CapturedLogContext as CapturedLogContext
from dagster._core.storage.compute_log_manager import CapturedLogData as CapturedLogData
from dagster._core.storage.compute_log_manager import CapturedLogMetadata as CapturedLogMetadata
from dagster._core.storage.compute_log_manager import CapturedLogSubscription as CapturedLogSubscription
from dagster._core.storage.compute_log_manager import ComputeIOType as ComputeIOType
from dagster._core.storage.compute_log_manager import ComputeLogManager as ComputeLogManager
from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager as LocalComputeLogManager
from dagster._grpc.types import ExecuteStepArgs as ExecuteStepArgs
from dagster._serdes import ConfigurableClass as ConfigurableClass
from dagster._serdes import ConfigurableClassData as ConfigurableClassData
from dagster._serdes import deserialize_value as deserialize_value
from dagster._serdes import serialize_value as serialize_value

PIPES_CLIENT = "crater"
STATEMENT_TIMEOUT_MS = 600_000
SQLITE_TIMEOUT_S = 30
FINAL_STEP_EVENTS = {DagsterEventType.STEP_SUCCESS, DagsterEventType.STEP_FAILURE, DagsterEventType.STEP_UP_FOR_RETRY}


def storage_id(instance: DagsterInstance) -> str | None:
    """What tells this instance's runs from another's; None where its storage has no such id."""
    ask = getattr(_inner(instance.run_storage, "run_storage"), "get_run_storage_id", None)
    return ask() if ask is not None else None


def _inner(storage: Any, part: str) -> Any:
    """A storage that is configured as one for everything shows itself through a wrapper for each part."""
    return getattr(getattr(storage, "_storage", storage), part, storage)


def has_final_event(instance: DagsterInstance, run_id: str, step_key: str) -> bool:
    """Whether the step's newest attempt has ended in the event log. An attempt begins when its executor launches it."""
    of_type = {*FINAL_STEP_EVENTS, DagsterEventType.STEP_WORKER_STARTING}
    final, cursor, more = False, None, True
    while more:
        page = instance.get_records_for_run(run_id, cursor, of_type=of_type)
        for record in page.records:
            event = record.event_log_entry.dagster_event
            if event is not None and event.step_key == step_key:
                final = event.event_type is not DagsterEventType.STEP_WORKER_STARTING
        cursor, more = page.cursor, page.has_more
    return final


def events_after(
    instance: DagsterInstance, run_id: str, number: int, known: Collection[int], limit: int
) -> list[tuple[int, DagsterEvent]]:
    """The first `limit` of the run's events with higher numbers in the event log, in order, but for the `known` ones, which
    Dagster's own call would read again."""
    from dagster._core.events.log import EventLogEntry
    from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
    from sqlalchemy import select

    columns = SqlEventLogStorageTable.c
    query = select(columns.id, columns.event).where(
        columns.run_id == run_id, columns.id > number, columns.dagster_event_type.is_not(None)
    )
    if known:
        query = query.where(columns.id.not_in(known))
    with _inner(instance.event_log_storage, "event_log_storage").run_connection(run_id) as connection:
        rows = connection.execute(query.order_by(columns.id).limit(limit)).fetchall()
    found = [(row, deserialize_value(text, EventLogEntry).dagster_event) for row, text in rows]
    return [(row, event) for row, event in found if event is not None]


def report_step_event(
    instance: DagsterInstance, run: DagsterRun, step_key: str | None, message: str, metadata: Mapping[str, MetadataValue]
) -> None:
    """One line in the run's event log that belongs to a step, or to the whole run."""
    instance.report_engine_event(message, run, EngineEventData(metadata=dict(metadata)), step_key=step_key)


def report_warning(instance: DagsterInstance, run: DagsterRun, step_key: str | None, message: str) -> None:
    """As `report_step_event`, at the level of a warning."""
    kind = DagsterEventType.ENGINE_EVENT.value
    event = DagsterEvent(kind, run.job_name, message=message, event_specific_data=EngineEventData({}), step_key=step_key)
    instance.report_dagster_event(event, run_id=run.run_id, log_level=logging.WARNING)


def code_location_layer(run: DagsterRun) -> tuple[str | None, Mapping[str, Any]]:
    """Image and container context that the run's code location declares."""
    origin = run.job_code_origin
    repository = origin.repository_origin if origin else None
    return (repository.container_image, repository.container_context or {}) if repository else (None, {})


def code_module(run: DagsterRun) -> str | None:
    """The module that the run's code location is loaded from, where it is loaded from one."""
    from dagster._core.code_pointer import ModuleCodePointer, PackageCodePointer

    origin = run.job_code_origin
    pointer = origin.repository_origin.code_pointer if origin else None
    return pointer.module if isinstance(pointer, (ModuleCodePointer, PackageCodePointer)) else None


# In a template and in a worker process

_preloaded: list[tuple[DagsterInstance, list[Any]]] = []
"""This node's instance as the template opened it, with the engines that `keep_connections` gave for it."""


def preload(modules: Sequence[str]) -> None:
    """Import what workers need, open this node's instance, and go once through what every worker does: much of Dagster is made at
    its first use, which forks then find made. `modules` are the code locations'. No connection and no thread is left."""
    import dagster._cli.api
    import dagster._core.execution.api
    import dagster._core.execution.plan.execute_plan
    import dagster._core.executor.in_process
    import dagster._utils.hosted_user_process  # noqa: F401
    import httpcore  # noqa: F401  # httpx does so when its first client is made.

    if worker_environment_problem():
        return
    instance = DagsterInstance.get()
    engines = keep_connections(instance)
    _rehearse(instance, bool(engines))
    for name in modules:
        with suppress(Exception):  # A worker tells what is wrong with the code, where somebody reads it.
            _load_definitions(name)
    _close_files()
    for engine in engines:
        engine.dispose()
    _preloaded[:] = [(instance, engines)]


def _rehearse(instance: DagsterInstance, on_a_server: bool) -> None:
    from dagster import job, op

    instance.get_run_records(limit=1)
    if on_a_server:
        with _inner(instance.event_log_storage, "event_log_storage").index_connection() as connection:
            connection.exec_driver_sql("select 1")

    @op
    def nothing() -> None: ...

    @job
    def rehearsal() -> None:
        nothing()

    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    with DagsterInstance.ephemeral() as nowhere:
        rehearsal.execute_in_process(instance=nowhere, run_config=quiet)


def _load_definitions(module: str) -> None:
    """As a worker does. What a `Definitions` is made into stays with it; a function that gives one imports what it needs."""
    from dagster._core.code_pointer import ModuleCodePointer
    from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext
    from dagster._core.definitions.reconstruct import reconstruct_repository_def_from_pointer
    from dagster._core.workspace.autodiscovery import loadable_targets_from_loaded_module

    before = DefinitionsLoadContext._instance
    try:
        for target in loadable_targets_from_loaded_module(sys.modules[module]):
            reconstruct_repository_def_from_pointer(ModuleCodePointer(module, target.attribute, None))
    finally:
        DefinitionsLoadContext._instance = before


def open_instance() -> AbstractContextManager[DagsterInstance]:
    """This node's instance: the template's, in a fork of one, else a new one."""
    return nullcontext(_preloaded[0][0]) if _preloaded else DagsterInstance.get()


def keep_connections(instance: DagsterInstance) -> list[Any]:
    """Have the storages keep a database connection between two uses, as Dagster's web server does; a connection for each
    event costs ten times the event. The SQLAlchemy engines that keep one to a server now; none for SQLite."""
    for known, engines in _preloaded:
        if known is instance:
            return engines
    instance.optimize_for_webserver(statement_timeout=STATEMENT_TIMEOUT_MS, pool_recycle=3600, max_overflow=20)
    runs, events = _inner(instance.run_storage, "run_storage"), _inner(instance.event_log_storage, "event_log_storage")
    engines = _one_where_they_can(runs, events)
    _keep_run_file_open(runs)
    _keep_event_files_open(events)
    os.register_at_fork(after_in_child=lambda: [engine.dispose(close=False) for engine in (*engines, *_files.values())])
    return engines


def _one_where_they_can(runs: Any, events: Any) -> list[Any]:
    """The engines of both storages. Where they reach one database in one way they share one, so that a worker connects once."""
    engines = [engine for part in (runs, events) if hasattr(engine := getattr(part, "_engine", None), "dispose")]
    tokens = [getattr(part, "_token_provider", None) for part in (runs, events)]
    if len(engines) == 2 and engines[0].url == engines[1].url and tokens[0] is tokens[1]:
        engines.pop().dispose()
        events._engine = engines[0]
    return engines


def writes_in_turn(instance: DagsterInstance) -> bool:
    """Whether events become visible in the order of their numbers: in SQLite one writer waits for the other."""
    from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage

    return isinstance(_inner(instance.event_log_storage, "event_log_storage"), SqliteEventLogStorage)


_files: dict[str, Any] = {}
"""The engines that keep SQLite files open, by URL, as they come to be."""


def _close_files() -> None:
    for engine in _files.values():
        engine.dispose()


def _file(url: str) -> Any:
    from sqlalchemy import create_engine

    if url not in _files:
        _files[url] = create_engine(url, pool_size=1, connect_args={"timeout": SQLITE_TIMEOUT_S})
    return _files[url]


def _has_all_tables(engine: Any) -> bool:
    """Of a SQLite event log that another process may be making just now: Dagster stamps the schema's version last."""
    from sqlalchemy import text
    from sqlalchemy.exc import OperationalError

    try:
        with engine.connect() as connection:
            return connection.execute(text("SELECT count(*) FROM alembic_version")).scalar() > 0
    except OperationalError:
        return False


def _keep_run_file_open(storage: Any) -> None:
    """Dagster makes an engine for each use of a SQLite run storage, which then translates each statement anew."""
    from dagster._core.storage.runs.sqlite.sqlite_run_storage import SqliteRunStorage

    if type(storage) is SqliteRunStorage:
        storage.connect = lambda: _file(storage._conn_string).begin()  # type: ignore[method-assign]


def _keep_event_files_open(storage: Any) -> None:
    """Dagster makes an engine and opens the file of a SQLite event log for each event. Whoever closes a file last also merges its
    write-ahead log into it, which waits for the disk: twice as long as the event itself.
    """
    from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage

    if not isinstance(storage, SqliteEventLogStorage):
        return
    opened_anew, complete = storage._connect, set[str]()

    @contextmanager
    def connect(shard: str) -> Iterator[Any]:
        url = storage.conn_string_for_shard(shard)
        if url not in complete:
            if not (os.path.exists(storage.path_for_shard(shard)) and _has_all_tables(_file(url))):  # noqa: PTH110
                with opened_anew(shard):
                    """Makes the tables, or waits for another process that does so."""
            complete.add(url)
        with storage._db_lock, _file(url).begin() as connection:
            yield connection

    storage._connect = connect  # type: ignore[method-assign]


def capture_interrupts() -> AbstractContextManager[None]:
    """Inside, SIGTERM and SIGINT are noted, and raised where Dagster allows it."""
    from dagster._utils.interrupts import capture_interrupts as capture

    return capture()


def execute_run(instance: DagsterInstance, run: DagsterRun, resume: bool) -> int:
    """Drive a run to its end in this process; 1 when it failed."""
    from dagster._cli.api import _execute_run_command_body, _resume_run_command_body

    body = _resume_run_command_body if resume else _execute_run_command_body
    return body(run.run_id, instance, lambda event: None, True)


def is_driven_by(run: DagsterRun, executor_name: str) -> bool:
    """Whether the run's job uses that executor. Loads the job."""
    from dagster._utils.hosted_user_process import recon_job_from_origin

    origin = run.job_code_origin
    return origin is not None and recon_job_from_origin(origin).get_definition().executor_def.name == executor_name


def execute_step(instance: DagsterInstance, run: DagsterRun, fields: Mapping[str, Any]) -> Iterator[DagsterEvent]:
    """Run steps in this process. `fields` as `step_fields` gave them."""
    from dagster._cli.api import _execute_step_command_body
    from dagster._core.execution.plan.state import KnownExecutionState

    assert run.job_code_origin is not None, "a run on a node has a code origin"
    args = ExecuteStepArgs(
        job_origin=run.job_code_origin,
        run_id=run.run_id,
        step_keys_to_execute=list(fields["step_keys"]),
        retry_mode=RetryMode(fields["retry_mode"]) if fields["retry_mode"] else None,
        known_state=deserialize_value(fields["known_state"], KnownExecutionState) if fields["known_state"] else None,
        should_verify_step=False,
    )
    yield from _execute_step_command_body(args, instance, run)


def step_fields(args: ExecuteStepArgs) -> dict[str, Any]:
    """What a step worker needs to know; neither the instance nor the code origin, which its node has."""
    return {
        "run_id": args.run_id,
        "step_keys": list(args.step_keys_to_execute or ()),
        "retry_mode": args.retry_mode.value if args.retry_mode else None,
        "known_state": serialize_value(args.known_state) if args.known_state else None,
    }


def retry_number(args: ExecuteStepArgs, step_key: str) -> int:
    """How many attempts of the step came before this one."""
    return args.known_state.get_retry_state().get_attempt_count(step_key) if args.known_state else 0


def add_to_materializations(instance: DagsterInstance, metadata: Callable[[], Mapping[str, MetadataValue]]) -> None:
    """From now on every materialization that this process reports carries `metadata()`, unless it has such figures (Pipes)."""
    report = instance.handle_new_event

    def with_metadata(event: Any, **options: Any) -> None:
        inner = event.dagster_event
        if inner is not None and inner.event_type is DagsterEventType.ASSET_MATERIALIZATION:
            data = inner.event_specific_data
            old: AssetMaterialization = data.materialization
            if not any(name.startswith("crater/") for name in old.metadata):
                new = old.with_metadata({**metadata(), **old.metadata})
                event = event._replace(dagster_event=inner._replace(event_specific_data=data._replace(materialization=new)))
        report(event, **options)

    instance.handle_new_event = with_metadata  # type: ignore[method-assign]


def hold_back_interruptions(instance: DagsterInstance, when: Callable[[], bool]) -> None:
    """From now on this process reports no end that only says that it was interrupted, when `when()` holds: somebody else
    knows why, and whether the work goes on elsewhere."""
    report = instance.handle_new_event

    def without_interruptions(event: Any, **options: Any) -> None:
        inner = event.dagster_event
        if inner is not None and _says_interrupted(inner) and when():
            message = f"Interrupted; what becomes of it is told by the scheduler ({inner.event_type_value} is held back)."
            instance.report_engine_event(message, run_id=event.run_id, job_name=event.job_name, step_key=event.step_key)
            return
        report(event, **options)

    instance.handle_new_event = without_interruptions  # type: ignore[method-assign]


def _says_interrupted(event: DagsterEvent) -> bool:
    if event.event_type is DagsterEventType.RUN_CANCELED:
        return True
    if event.event_type is DagsterEventType.STEP_FAILURE:
        error = event.step_failure_data.error
    elif event.event_type is DagsterEventType.STEP_UP_FOR_RETRY:
        error = event.step_retry_data.error
    elif event.event_type is DagsterEventType.RUN_FAILURE:
        return event.job_failure_data.failure_reason is RunFailureReason.UNEXPECTED_TERMINATION
    else:
        return False
    while error is not None:
        if error.cls_name in ("DagsterExecutionInterruptedError", "KeyboardInterrupt"):
            return True
        error = error.cause or error.context
    return False


def keep_steps_when(instance: DagsterInstance, go_on: Callable[[Callable[[str], bool], str], bool]) -> None:
    """Dagster's executor leaves its steps running when this process is interrupted and `go_on(what Dagster says, run id)`
    holds; else it ends them."""
    dagster_says = instance.run_will_resume
    instance.run_will_resume = lambda run_id: go_on(dagster_says, run_id)  # type: ignore[method-assign]


@contextmanager
def executing_as(execution: type[ActiveExecution]) -> Iterator[None]:
    """Inside, Dagster's step-delegating loop keeps its record of a run's steps in an `execution`."""
    from dagster._core.executor.step_delegating import step_delegating_executor as loop

    before = loop.ActiveExecution
    loop.ActiveExecution = execution  # type: ignore[misc]
    try:
        yield
    finally:
        loop.ActiveExecution = before  # type: ignore[misc]


def worker_environment_problem() -> str:
    """Why Dagster cannot find its instance here, if it cannot."""
    home = os.environ.get("DAGSTER_HOME", "")
    if not home:
        return "DAGSTER_HOME is not set; name an env_profile in the run launcher's config whose node sets it"
    if not os.path.isdir(home):  # noqa: PTH112
        return f"DAGSTER_HOME is {home}, which is no directory on this node"
    return ""


# Pipes


def record_launch(context: Any, task_id: str, extras: Mapping[str, Any]) -> None:
    """So that a later attempt of the same step finds the task instead of starting another."""
    from dagster._core.pipes.reattach import record_external_launch

    record_external_launch(context, client_name=PIPES_CLIENT, external_run_id=task_id, extras=extras)


def find_launch(context: Any) -> tuple[str, Mapping[str, Any]] | None:
    """Task and extras of the step's last launch: in this run, or in the run that this one retries from its failure."""
    from dagster._core.pipes.reattach import find_latest_launch_handle

    handle = find_latest_launch_handle(context, client_name=PIPES_CLIENT)
    return (handle.external_run_id, handle.extras) if handle else None


def forget_messages(handler: Any) -> None:
    """What a lost or preempted attempt has reported does not count: the next one reports it all again."""
    for queue in (handler._result_queue, handler._extra_msg_queue):
        with queue.mutex:
            queue.queue.clear()
    handler._opened_count = handler._closed_count = 0


def settle_writers(handler: Any) -> None:
    """The program has ended: who has not opened Pipes by now was not going to. In a gang often only the first member does."""
    handler._expected_writers = max(1, min(handler._expected_writers, handler._opened_count))
