"""Dagster's own limits on what runs at once, and retry policies, hold for steps that are tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dagster import DagsterEventType
from dagster_world import World
from harness import PATIENCE_S, wait_until

from crater_dagster.reasons import FAILURE_TAG


def _begin(world: World, job: str, gate: Path, started: int, **executor: Any) -> str:
    """A run whose steps wait for the gate, once so many of them have begun."""
    run_id = world.launch(job, {"execution": {"config": executor}}, {"gate": str(gate)})
    begun = lambda: len(world.events(run_id, DagsterEventType.STEP_START)) >= started  # noqa: E731
    wait_until(begun, PATIENCE_S, f"{started} step(s) of {job} have begun")
    return run_id


def _steps(world: World, run_id: str) -> set[str]:
    """The steps that the scheduler knows of."""
    return {task.labels["dagster/step_key"] for task in world.tasks(run_id) if task.labels["crater/role"] == "step"}


def _at_once(world: World, run_id: str, steps: set[str]) -> int:
    """How many of these steps ran at the same time, at most."""
    kinds = {DagsterEventType.STEP_START: 1, DagsterEventType.STEP_SUCCESS: -1}
    moves = [kinds[event.event_type] for event in world.events(run_id) if event.event_type in kinds and event.step_key in steps]
    return max(sum(moves[:end]) for end in range(1, len(moves) + 1))


def test_no_more_steps_than_max_concurrent_are_asked_for_at_once(rules_world: World, tmp_path: Path):
    run_id = _begin(rules_world, "holding", tmp_path / "gate", 2, max_concurrent=2)
    assert len(_steps(rules_world, run_id)) == 2
    (tmp_path / "gate").touch()
    assert rules_world.finish(run_id) == "SUCCESS", rules_world.story(run_id)
    assert _steps(rules_world, run_id) == {"a", "b", "c", "d"}
    assert _at_once(rules_world, run_id, {"a", "b", "c", "d"}) == 2


def test_tag_concurrency_limits_hold_for_the_steps_that_carry_the_tag(rules_world: World, tmp_path: Path):
    limit = {"key": "uses", "value": "database", "limit": 1}
    run_id = _begin(rules_world, "using", tmp_path / "gate", 2, tag_concurrency_limits=[limit])
    assert len(_steps(rules_world, run_id)) == 2
    assert "free" in _steps(rules_world, run_id)
    (tmp_path / "gate").touch()
    assert rules_world.finish(run_id) == "SUCCESS", rules_world.story(run_id)
    assert _steps(rules_world, run_id) == {"a", "b", "free"}
    assert _at_once(rules_world, run_id, {"a", "b"}) == 1


def test_a_pool_of_one_slot_lets_one_step_of_all_runs_be_asked_for(rules_world: World, tmp_path: Path):
    rules_world.instance.event_log_storage.set_concurrency_slots("database", 1)
    first = _begin(rules_world, "pooling", tmp_path / "gate", 1)
    second = rules_world.launch("pooling", tags={"gate": str(tmp_path / "gate")})
    blocked = lambda: any("blocked by" in text for text in rules_world.messages(second))  # noqa: E731
    wait_until(blocked, PATIENCE_S, "the second run is told what it waits for")
    assert (len(_steps(rules_world, first)), _steps(rules_world, second)) == (1, set())
    assert rules_world.launcher.terminate(second)
    assert rules_world.finish(second, 30) == "CANCELED"
    (tmp_path / "gate").touch()
    assert rules_world.finish(first) == "SUCCESS", rules_world.story(first)
    assert _at_once(rules_world, first, {"a", "b", "c"}) == 1
    slots = rules_world.instance.event_log_storage.get_concurrency_info("database")
    assert (slots.slot_count, slots.active_slot_count, slots.pending_step_count) == (1, 0, 0)


def test_a_step_over_its_time_is_retried_as_its_policy_says_and_leaves_no_mark_on_the_run(rules_world: World):
    run_id = rules_world.launch("late_once")
    assert rules_world.finish(run_id) == "SUCCESS", rules_world.story(run_id)
    (again,) = rules_world.events(run_id, DagsterEventType.STEP_UP_FOR_RETRY)
    assert "time limit of 3 s" in again.step_retry_data.error.message
    ended = {
        task.labels["dagster/retry"]: task.reason and task.reason.code
        for task in rules_world.tasks(run_id)
        if task.labels["crater/role"] == "step"
    }
    assert ended == {"0": "time_limit", "1": "finished"}
    assert FAILURE_TAG not in rules_world.run(run_id).tags
