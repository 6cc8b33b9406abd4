"""A run whose worker was killed goes on under the next one from what its event log says, however the log came to be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from dagster import DagsterEventType
from dagster_world import World
from harness import PATIENCE_S, wait_until

from crater_dagster._dagster import RunFailureReason


def _lose_the_worker_and_resume(world: World, run_id: str) -> None:
    os.kill(world.worker_pid(run_id, None), signal.SIGKILL)
    wait_until(lambda: world.task_of(run_id, None).ended, 10, "the run worker's end is known")
    world.resume(run_id, 1)


def _runs(world: World, run_id: str, step: str) -> None:
    started = lambda: step in {event.step_key for event in world.events(run_id, DagsterEventType.STEP_START)}  # noqa: E731
    wait_until(started, PATIENCE_S, f"{step} runs")


def test_a_step_that_was_retried_after_a_delay_is_not_waited_for_again(rules_world: World, tmp_path: Path):
    run_id = rules_world.launch("at_the_second_attempt", tags={"gate": str(tmp_path / "gate")})
    _runs(rules_world, run_id, "holds_on_to")
    _lose_the_worker_and_resume(rules_world, run_id)
    (tmp_path / "gate").touch()
    assert rules_world.finish(run_id) == "SUCCESS", rules_world.story(run_id)
    assert len(rules_world.events(run_id, DagsterEventType.STEP_UP_FOR_RETRY)) == 1
    assert len(rules_world.events(run_id, DagsterEventType.STEP_SUCCESS)) == 2


def test_a_log_of_more_events_than_dagster_reads_at_once_is_gone_through_to_its_end(rules_world: World, tmp_path: Path):
    run_id = rules_world.launch("after_much", tags={"gate": str(tmp_path / "gate")})
    _runs(rules_world, run_id, "holds_on_to")
    assert len(rules_world.events(run_id, DagsterEventType.ASSET_OBSERVATION)) == 1_100
    _lose_the_worker_and_resume(rules_world, run_id)
    (tmp_path / "gate").touch()
    assert rules_world.finish(run_id) == "SUCCESS", rules_world.story(run_id)
    assert [event.step_key for event in rules_world.events(run_id, DagsterEventType.STEP_START)] == ["sees_much", "holds_on_to"]


def test_a_step_that_ended_needs_no_slot_of_a_pool_that_another_run_holds_by_now(rules_world: World, tmp_path: Path):
    world, gates = rules_world, (tmp_path / "gate", tmp_path / "other")
    world.instance.event_log_storage.set_concurrency_slots("database", 1)
    run_id = world.launch("through_the_pool", tags={"gate": str(gates[0])})
    _runs(world, run_id, "holds_on_to")
    other = world.launch("pooling", tags={"gate": str(gates[1])})
    wait_until(lambda: world.events(other, DagsterEventType.STEP_START), PATIENCE_S, "the other run holds the slot")
    _lose_the_worker_and_resume(world, run_id)
    gates[0].touch()
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    gates[1].touch()
    assert world.finish(other) == "SUCCESS", world.story(other)
    slots = world.instance.event_log_storage.get_concurrency_info("database")
    assert (slots.slot_count, slots.active_slot_count, slots.pending_step_count) == (1, 0, 0)


def test_the_limit_of_steps_at_once_holds_after_it_too(rules_world: World, tmp_path: Path):
    run_id = rules_world.launch("holding", {"execution": {"config": {"max_concurrent": 2}}}, {"gate": str(tmp_path / "gate")})
    wait_until(lambda: len(rules_world.events(run_id, DagsterEventType.STEP_START)) == 2, PATIENCE_S, "two steps run")
    _lose_the_worker_and_resume(rules_world, run_id)
    asked = lambda: sum("Checking on status" in text for text in rules_world.messages(run_id)) == 2  # noqa: E731
    wait_until(asked, PATIENCE_S, "both are asked after")
    (tmp_path / "gate").touch()
    assert rules_world.finish(run_id) == "SUCCESS", rules_world.story(run_id)
    # By the order in the log: a third step is handed out only when one of two has ended.
    handed_out = set[str]()
    for event in rules_world.events(run_id):
        if event.event_type is DagsterEventType.STEP_WORKER_STARTING:
            handed_out.add(event.step_key or "")
        elif event.event_type is DagsterEventType.STEP_SUCCESS:
            handed_out.remove(event.step_key or "")
        assert len(handed_out) <= 2, rules_world.story(run_id)
    assert len(rules_world.events(run_id, DagsterEventType.STEP_START)) == 4


def test_steps_that_were_skipped_failed_left_out_or_mapped_stay_what_they_became(rules_world: World, tmp_path: Path):
    run_id = rules_world.launch("of_every_kind", tags={"gate": str(tmp_path / "gate")})
    _runs(rules_world, run_id, "holds_on_to")
    wait_until(lambda: len(rules_world.events(run_id, DagsterEventType.STEP_SKIPPED)) == 2, PATIENCE_S, "two steps are skipped")
    wait_until(lambda: rules_world.events(run_id, DagsterEventType.STEP_FAILURE), PATIENCE_S, "one has failed")
    _lose_the_worker_and_resume(rules_world, run_id)
    (tmp_path / "gate").touch()
    assert rules_world.finish(run_id) == "FAILURE"
    # For the step that failed before, and not because the run could not be taken over.
    (end,) = rules_world.events(run_id, DagsterEventType.RUN_FAILURE)
    assert end.job_failure_data.failure_reason is RunFailureReason.STEP_FAILURE, rules_world.story(run_id)
    steps = lambda kind: sorted(event.step_key or "" for event in rules_world.events(run_id, kind))  # noqa: E731
    done = ["adds_up", "holds_on_to", "makes_two", "passes_on[one]", "passes_on[two]", "says_yes"]
    assert steps(DagsterEventType.STEP_SUCCESS) == done, rules_world.story(run_id)
    assert steps(DagsterEventType.STEP_SKIPPED) == ["skipped", "skipped_too"]
    assert steps(DagsterEventType.STEP_FAILURE) == ["fails"]
    assert steps(DagsterEventType.STEP_START) == sorted([*done, "fails"])
