"""`CraterRunLauncher`: each Dagster run is a small task that starts at once; only its steps queue for compute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from dagster import DagsterInstance, DagsterRun, Field, MetadataValue, StringSource

from crater_core.client import CraterClient
from crater_core.errors import CraterError, NotFound, SchedulerUnreachable, Unavailable
from crater_core.model.units import parse_duration_ms
from crater_core.wire.tasks import TaskSubmission, TaskView
from crater_dagster._dagster import (
    CheckRunHealthResult,
    ConfigurableClass,
    ConfigurableClassData,
    LaunchRunContext,
    ResumeRunContext,
    RunLauncher,
    WorkerStatus,
    report_step_event,
)
from crater_dagster.config import (
    AMOUNT_FIELDS,
    CONNECTION_FIELDS,
    OPTION_FIELDS,
    RUN_FIELDS,
    code_location_options,
    group_of,
    make_client,
    options_in,
    run_options,
)
from crater_dagster.following import ROLE, RUN_WORKER, FollowedRuns, settle_run
from crater_dagster.options import check_run_on, merge, of_one_process, submission
from crater_dagster.owner import owner_label
from crater_dagster.payload import pack
from crater_dagster.reasons import FAILED_STEP_TAG, FAILURE_TAG, NONE, console_link, how_it_ended, sentence, why_it_waits
from crater_dagster.story import last_lines, timeline
from crater_dagster.warm import preload_of

WORKER_RESOURCES = {"cpu": 0.25, "memory": "640MiB"}
_QUICK_S, _PATIENT_S = 3.0, 10.0


class CraterRunLauncher(RunLauncher[DagsterInstance], ConfigurableClass):
    """Launches run workers as Crater tasks. Configured in `dagster.yaml`; constructing it does no I/O and starts nothing.

    `resources`, `project` and the like are the lowest layer for the runs' steps too; a run worker itself asks for
    `run_worker` and nothing else, unless its run is marked `run_on: compute`.
    """

    def __init__(self, inst_data: ConfigurableClassData | None = None, **config: Any) -> None:
        self._inst_data = inst_data
        self._config = config
        self._clients: dict[float, CraterClient] = {}
        self._grace_ms = parse_duration_ms(config.get("unreachable_grace", "15m"), "unreachable_grace")
        self._unreachable_since: float | None = None
        self._followed = FollowedRuns(lambda: self._instance, lambda: self.client(_QUICK_S))
        super().__init__()

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        worker = {"cpu": AMOUNT_FIELDS["cpu"], "memory": AMOUNT_FIELDS["memory"]}
        return {
            **CONNECTION_FIELDS,
            **OPTION_FIELDS,
            **RUN_FIELDS,
            "run_worker": Field(worker, is_required=False, description="CPU and memory of a run worker. Default: 0.25, 640MiB."),
            "console_url": Field(
                StringSource,
                is_required=False,
                description="Where people open Crater's console, for links. Default: the first endpoint.",
            ),
            "unreachable_grace": Field(
                StringSource,
                is_required=False,
                description="How long a run counts as alive while no scheduler answers. Default: 15m.",
            ),
        }

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        return cls(inst_data=inst_data, **config_value)

    @property
    def options(self) -> dict[str, Any]:
        """The lowest layer of what tasks ask for."""
        return options_in(self._config)

    @property
    def connection(self) -> dict[str, Any]:
        return {name: self._config.get(name) for name in CONNECTION_FIELDS}

    @property
    def console_url(self) -> str | None:
        return self._config.get("console_url")

    def client(self, retry_for_s: float = 30.0) -> CraterClient:
        if retry_for_s not in self._clients:
            self._clients[retry_for_s] = make_client(self._config, retry_for_s)
        return self._clients[retry_for_s]

    # Launch and resume

    def launch_run(self, context: LaunchRunContext) -> None:
        run = context.dagster_run
        # A run that is begun anew gets the tags of the one that failed, and Dagster takes none away again.
        inherited = {FAILURE_TAG, FAILED_STEP_TAG} & set(run.tags)
        if inherited:
            self._instance.add_run_tags(run.run_id, dict.fromkeys(inherited, NONE))
        self._start(run, 0)

    @property
    def supports_resume_run(self) -> bool:
        return True

    def resume_run(self, context: ResumeRunContext) -> None:
        self._start(context.dagster_run, context.resume_attempt_number or 1)

    def _start(self, run: DagsterRun, attempt: int) -> None:
        task = self._worker_task(run, attempt)
        view = self.client().submit(task, idempotency_key=f"{run.run_id}:run:{attempt}")
        where = f" on node {view.node}" if view.node else ""
        what = "Run worker" if attempt == 0 else f"Run worker {attempt + 1}"
        metadata = {
            "crater/task": MetadataValue.text(view.id),
            "crater/link": MetadataValue.url(console_link(self.console_url or self.client().endpoints[0], view.id)),
            "crater/group": MetadataValue.text(group_of(run.run_id)),
        }
        report_step_event(self._instance, run, None, f"{what} is task {view.id}{where}.", metadata)
        self._followed.follow(run, view)

    def _worker_task(self, run: DagsterRun, attempt: int) -> TaskSubmission:
        options = merge(self.options, code_location_options(run), run_options(run))
        compute = check_run_on(options) == "compute"
        # A run in one process cannot go on in the middle, so it is not tried again by the scheduler.
        options = {name: value for name, value in of_one_process(options).items() if name != "on_oom"}
        if not compute:
            # What the options ask for is for the steps; the worker that drives them is small.
            kept = ("project", "env_profile", "env", "image", "mounts", "python", "warm", "working_dir", "grace", "node_labels")
            options = {name: options[name] for name in kept if name in options}
            options["resources"] = {**WORKER_RESOURCES, **self._config.get("run_worker", {})}
        content = {"run_id": run.run_id, "resume": attempt > 0}
        return submission(
            options,
            name=f"run {run.job_name}"[:200],
            type="batch" if compute else "control",
            command=(options.get("python", "python"), "-m", "crater_dagster.worker", "run"),
            env=pack(content),
            warm_preload=preload_of(run, options),
            group=group_of(run.run_id),
            labels={
                ROLE: RUN_WORKER,
                "dagster/run_id": run.run_id,
                "dagster/job": run.job_name[:1000],
                **owner_label(self._instance),
            },
        )

    # Terminate

    def terminate(self, run_id: str) -> bool:
        """Ends the run's worker and every task that it or its steps have started. False when the run was over already."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        ended = self.client(_PATIENT_S).cancel_group(group_of(run_id), "its Dagster run was terminated")
        live = next((view for view in ended if _is_worker(view) and not view.ended), None)
        if live is not None:
            # It writes the run's end itself, unless it is stopped before it can, or has to be killed.
            self._followed.follow(run, live)
            return True
        # Nobody is left, or nobody ever was there, who would write the run's end.
        worker = self._worker(run_id)
        why = f" ({sentence(worker.reason)})" if worker and worker.reason else ""
        self._instance.report_run_canceled(run, f"Its run worker was not running{why}.")
        return True

    # Health and debug

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        try:
            worker = self._worker(run.run_id)
        except (Unavailable, SchedulerUnreachable) as error:
            return self._while_unreachable(error)
        self._unreachable_since = None
        if worker is None:
            return CheckRunHealthResult(WorkerStatus.NOT_FOUND, f"No task of group {group_of(run.run_id)} is a run worker.")
        if not worker.ended:
            waits = f"It waits: {sentence(worker.reason)}" if why_it_waits(worker) else None
            return CheckRunHealthResult(WorkerStatus.RUNNING, waits, run_worker_id=worker.id)
        if worker.status == "cancelled" and settle_run(self._instance, run.run_id, worker):
            # Monitoring would put another worker in its place.
            self.client(_QUICK_S).cancel_group(group_of(run.run_id), "its run has ended with its run worker")
        now = self._instance.get_run_by_id(run.run_id)
        if now is None or now.is_finished:
            return CheckRunHealthResult(WorkerStatus.SUCCESS, run_worker_id=worker.id)
        message = f"The run worker has left without finishing its run. {how_it_ended(worker)}"
        return CheckRunHealthResult(WorkerStatus.FAILED, message, run_worker_id=worker.id)

    def _while_unreachable(self, error: CraterError) -> CheckRunHealthResult:
        """That nobody answers says nothing about the worker, so it counts as running, for a bounded time."""
        now = time.monotonic()
        self._unreachable_since = self._unreachable_since or now
        silent_ms = round((now - self._unreachable_since) * 1000)
        if silent_ms < self._grace_ms:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"Not known: {error.message}", transient=True)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"Not known for longer than unreachable_grace: {error.message}")

    def get_run_worker_debug_info(self, run: DagsterRun, include_container_logs: bool | None = True) -> str | None:
        try:
            worker = self._worker(run.run_id)
            if worker is None:
                return f"No task of group {group_of(run.run_id)} is a run worker."
            client = self.client(_QUICK_S)
            lines = [f"Task {worker.id} is {worker.status}. {sentence(worker.reason)}", *timeline(client.events(worker.id))]
            if include_container_logs:
                lines += last_lines(client, worker.id)
            return "\n".join(lines)
        except CraterError as error:
            return f"The scheduler could not be asked: {error.message}"

    def _worker(self, run_id: str) -> TaskView | None:
        """The newest run worker of the run."""
        wanted = self.client(_QUICK_S).tasks(group=group_of(run_id), labels={ROLE: RUN_WORKER}, limit=1)
        try:
            return next(iter(wanted), None)
        except NotFound:
            return None

    def dispose(self) -> None:
        self._followed.stop()
        for client in self._clients.values():
            client.close()


def _is_worker(view: TaskView) -> bool:
    return view.labels.get(ROLE) == RUN_WORKER
