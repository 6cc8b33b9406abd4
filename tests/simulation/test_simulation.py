"""The whole cluster in one thread under every fault, from seeds; and proof that broken promises would be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.faults import FAULTS
from simulation.run import Outcome, simulate

SEEDS = range(2_000, 2_006)
"""A few new ones in every run of the tests; `make sim SEEDS=1000` runs many."""
OUTAGES = tuple(fault for fault in FAULTS if fault.startswith("scheduler_") and "pauses" not in fault)


def _once_failed() -> list[int]:
    lines = (Path(__file__).parent / "seeds.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def _story(outcome: Outcome) -> str:
    return "\n".join([*outcome.trace[-60:], f"seed {outcome.seed}: {outcome.failure}", f"again: make sim SEED={outcome.seed}"])


@pytest.mark.parametrize("seed", [*_once_failed(), *SEEDS])
def test_whatever_goes_wrong_every_promise_holds_and_every_task_ends(seed: int) -> None:
    outcome = simulate(seed)
    assert not outcome.failure, _story(outcome)
    assert outcome.tasks >= 10


def test_the_same_seed_tells_the_same_story() -> None:
    first, other, again = simulate(3, tasks=15), simulate(4, tasks=15), simulate(3, tasks=15)
    assert (first.digest, first.steps) == (again.digest, again.steps)
    assert first.digest != other.digest


def test_the_story_does_not_depend_on_how_the_process_hashes() -> None:
    program = "from simulation.run import simulate; print(simulate(3, tasks=15).digest)"
    paths = [str(Path(__file__).parents[1]), *sys.path]
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hashed, "PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for hashed in ("1", "2")
    }
    assert len(told) == 1


def test_a_scheduler_that_is_down_for_ten_minutes_costs_no_running_task() -> None:
    for seed in (1, 2):
        outcome = simulate(seed, OUTAGES, tasks=30, chaos_s=900.0, schedulers=1)
        assert not outcome.failure, _story(outcome)
        assert (outcome.fences, outcome.lost) == (0, 0), _story(outcome)


def test_two_schedulers_that_die_and_stop_cost_no_running_task() -> None:
    faults = ("scheduler_dies", "scheduler_dies_at_commit", "scheduler_stops", "scheduler_is_away_long")
    for seed in (1, 2):
        outcome = simulate(seed, faults, tasks=30, chaos_s=600.0, schedulers=2)
        assert not outcome.failure, _story(outcome)
        assert outcome.terms > 5, "the lead changed hands"
        assert (outcome.fences, outcome.lost) == (0, 0), _story(outcome)


def test_clocks_that_jump_on_nodes_change_nothing() -> None:
    calm = simulate(7, (), tasks=20)
    jumping = simulate(7, ("clock_of_node_jumps",), tasks=20)

    def deeds(outcome: Outcome) -> list[str]:
        return [line for line in outcome.trace if "FAULT" not in line]

    assert calm.trace != jumping.trace
    assert [line.split(maxsplit=1)[1] for line in deeds(calm)] == [line.split(maxsplit=1)[1] for line in deeds(jumping)]
