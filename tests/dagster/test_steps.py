"""The steps of a run as tasks of a real scheduler, without Dagster's loop."""

from __future__ import annotations

import time

import pytest
from harness import SchedulerProcess, wait_until

from crater_core.client import CraterClient
from crater_core.wire.tasks import TaskSubmission, TaskView
from crater_dagster.steps import Key, StepTasks

GROUP = "steps-test"


def _task(name: str, *command: str, memory: str = "64MiB") -> TaskSubmission:
    body = {"name": name, "command": command, "group": GROUP, "resources": {"cpu": 0.1, "memory": memory}}
    labels = {"dagster/step_key": name, "dagster/retry": "0", "made-by": "test-steps"}
    return TaskSubmission.model_validate({**body, "labels": labels})


@pytest.fixture
def told() -> list[tuple[Key, str]]:
    return []


@pytest.fixture
def tasks(cluster: CraterClient, told: list[tuple[Key, str]]):
    def tell(key: Key, view: TaskView, before: TaskView | None) -> None:
        told.append((key, view.status))

    with CraterClient(cluster.endpoints[0], retry_for_s=0) as client:
        yield StepTasks(client, GROUP, {"made-by": "test-steps"}, tell)
    cluster.cancel_group(GROUP)


def _until_ended(tasks: StepTasks, key: Key) -> TaskView:
    def ended() -> TaskView | None:
        tasks.follow(0.2)
        task = tasks.get(key)
        return task.view if task and task.ended else None

    return wait_until(ended, 20, f"{key} ended")


def test_many_are_submitted_in_one_call_and_followed_to_their_end(tasks: StepTasks, told: list[tuple[Key, str]]):
    for number in range(5):
        tasks.put((f"s{number}", 0), _task(f"s{number}", "true"), f"many-{time.monotonic()}-{number}")
    for number in range(5):
        assert _until_ended(tasks, (f"s{number}", 0)).status == "succeeded"
    assert (("s4", 0), "succeeded") in told
    assert tasks.unsettled()


def test_a_refused_one_does_not_keep_the_others(tasks: StepTasks):
    tasks.put(("good", 0), _task("good", "true"), f"good-{time.monotonic()}")
    tasks.put(("bad", 0), _task("bad", "true", memory="8000GiB"), f"bad-{time.monotonic()}")
    assert _until_ended(tasks, ("good", 0)).status == "succeeded"
    bad = tasks.get(("bad", 0))
    assert bad is not None
    assert bad.reason is not None
    assert "No node could ever run this" in bad.reason.message


def test_a_step_whose_end_is_in_the_log_is_not_waited_for_in_a_hurry(tasks: StepTasks):
    """Its process may take a moment longer, and the loop must neither spin nor look at its health meanwhile."""
    tasks.put(("slow", 0), _task("slow", "sleep", "1"), f"slow-{time.monotonic()}")
    tasks.follow(0.2)
    assert tasks.in_flight()
    tasks.settle("slow")
    assert not tasks.in_flight()
    _until_ended(tasks, ("slow", 0))
    assert not tasks.unsettled()


def test_another_run_worker_takes_over_what_is_there(tasks: StepTasks, cluster: CraterClient):
    tasks.put(("kept", 0), _task("kept", "sleep", "30"), f"kept-{time.monotonic()}")
    tasks.follow(0.2)
    other = StepTasks(cluster, GROUP, {"made-by": "test-steps"}, lambda key, view, before: None)
    other.find_earlier(cluster)
    kept, mine = other.get(("kept", 0)), tasks.get(("kept", 0))
    assert kept is not None
    assert mine is not None
    assert kept.view is not None
    assert mine.view is not None
    assert kept.view.id == mine.view.id
    assert other.launches[("kept", 0)] == 1
    other.cancel(("kept", 0), "the test is over")
    assert _until_ended(tasks, ("kept", 0)).status == "cancelled"


def test_what_no_scheduler_takes_waits_and_goes_out_later(tasks: StepTasks, scheduler: SchedulerProcess):
    scheduler.kill()
    try:
        tasks.put(("late", 0), _task("late", "true"), f"late-{time.monotonic()}")
        tasks.follow(0.05)
        assert "no scheduler answered" in tasks.unreachable
        assert tasks.in_flight()
    finally:
        scheduler.start()
    assert _until_ended(tasks, ("late", 0)).status == "succeeded"
    assert tasks.unreachable == ""
