"""Traces are read as written, and a replay is the scheduler's own decisions on a virtual clock."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import a_node, a_spec

from crater_core.cli.simulate import simulate as simulate_command
from crater_core.errors import InvalidRequest
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Settings
from crater_core.simulation import Arrival, Trace, fill, inflated, read_jobs, read_openb, simulate, with_known_ends

DATA = Path(__file__).parent / "data"


def openb() -> Trace:
    return read_openb(DATA / "nodes.csv", DATA / "tasks.csv")


def a_trace(*arrivals: Arrival, gpus: int = 1, nodes: int = 1) -> Trace:
    return Trace("made", tuple(a_node(f"n{i}", gpus=gpus) for i in range(nodes)), arrivals)


def test_nodes_and_tasks_are_read_with_their_shares_types_and_times() -> None:
    trace = openb()
    assert [len(node.devices) for node in trace.nodes] == [2, 2, 0]
    gpus = [arrival.spec.request.gpu for arrival in trace.arrivals]
    assert gpus[1] == GpuRequest(1, 460, 0, exclusive=False)
    assert gpus[2] == GpuRequest(2, types=("a100",))
    assert gpus[3] is None
    assert gpus[4] == GpuRequest(1, 300, 0, exclusive=False, types=("t4", "a100"))
    assert (trace.arrivals[1].at_ms, trace.arrivals[1].runs_ms) == (10_000, 100_000)


def test_jobs_get_as_many_nodes_as_the_load_asks_for() -> None:
    # 200 + 200 + 10 + 300 + 1 GPU seconds over 400 s and two GPUs a node: 711 / (2 * 400) of one node.
    assert len(read_jobs(DATA / "jobs.csv", gpus_per_node=2, load_milli=250).nodes) == round(711 / (0.25 * 2 * 400))
    assert read_jobs(DATA / "jobs.csv", gpus_per_node=2).arrivals[1].spec.members == 2


def test_a_file_without_the_columns_is_told_so(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequest, match="lacks the columns"):
        read_openb(wrong, DATA / "tasks.csv")


def test_a_replay_measures_waits_use_and_ends() -> None:
    trace = a_trace(Arrival(a_spec(gpu=1000), 0, 1000), Arrival(a_spec(gpu=1000), 500, 1000))
    outcome = simulate(trace, Settings())
    assert (outcome.tasks, outcome.finished, outcome.refused) == (2, 2, 0)
    assert outcome.waits_ms == [0, 500]
    assert outcome.span_ms == 2000
    assert outcome.utilisation == 1.0


def test_a_task_that_no_node_could_run_is_refused() -> None:
    outcome = simulate(a_trace(Arrival(a_spec(gpu=2000), 0, 1)), Settings())
    assert (outcome.refused, outcome.finished) == (1, 0)


def test_a_replay_gives_the_same_outcome_twice() -> None:
    trace = with_known_ends(read_jobs(DATA / "jobs.csv", gpus_per_node=2))
    assert simulate(trace, Settings()) == simulate(trace, Settings())


def test_backfill_uses_the_gap_and_the_head_starts_when_it_would_have() -> None:
    """Two GPUs: one is busy for 100 s, the head wants both, and a short task fits into the gap beside the busy one."""
    busy, head, short = (a_spec(gpu=1000, cpu=1), a_spec(gpu=2000, cpu=1), a_spec(gpu=1000, cpu=1))
    trace = a_trace(Arrival(busy, 0, 100_000), Arrival(head, 1000, 1000), Arrival(short, 2000, 50_000), gpus=2)
    strict = simulate(with_known_ends(trace), Settings(passing="none"))
    filled = simulate(with_known_ends(trace), Settings(passing="backfill"))
    assert strict.started_ms == {"t0000000": 0, "t0000001": 100_000, "t0000002": 101_000}
    assert filled.started_ms == {"t0000000": 0, "t0000001": 100_000, "t0000002": 2000}


def test_a_quota_holds_in_a_replay() -> None:
    policy = QuotaPolicy("q", ("default",), Limits(gpu_milli=1000))
    trace = a_trace(Arrival(a_spec(gpu=1000), 0, 1000), Arrival(a_spec(gpu=1000), 0, 1000), gpus=2)
    assert sorted(simulate(trace, Settings(), [policy]).waits_ms) == [0, 1000]


def test_preemption_in_a_replay_counts_the_work_it_throws_away() -> None:
    low, high = a_spec(gpu=1000, priority=10), a_spec(gpu=1000, priority=90, strategy="preemptive")
    trace = a_trace(Arrival(low, 0, 100_000), Arrival(high, 70_000, 1000))
    outcome = simulate(trace, Settings())
    assert (outcome.preemptions, outcome.lost_work_ms, outcome.finished) == (1, 70_000, 2)
    assert outcome.started_ms["t0000001"] == 70_000


def test_filling_takes_every_task_once_and_then_some() -> None:
    trace = openb()
    specs = inflated(trace, seed=1)
    assert {spec.name for spec in specs} == {arrival.spec.name for arrival in trace.arrivals}
    assert inflated(trace, seed=1) == specs


@pytest.mark.parametrize("strategy", ["best_fit", "fragmentation_aware"])
def test_filling_holds_no_more_than_was_asked_for(strategy: str) -> None:
    result = fill(openb(), strategy, seed=1)
    assert 0 < result.placed <= result.arrivals
    assert all(0 <= ratio <= 100 for ratio in result.ratio_percent.values())


def test_fragmentation_aware_keeps_whole_cards_whole() -> None:
    """Cards that take shares of 0.6: two tasks of 0.4 share one card rather than spoil two."""
    shared = replace(a_spec(gpu=400, cpu=1), name="small")
    trace = read_openb(DATA / "nodes.csv", DATA / "tasks.csv")
    trace = Trace("made", trace.nodes[:1], (Arrival(shared), Arrival(shared), Arrival(a_spec(gpu=1000, cpu=1))))
    assert simulate(trace, Settings(strategy="fragmentation_aware")).waits_ms == [0, 0, 0]


def test_the_command_compares_policies(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_command(DATA / "jobs.csv", policy=["best_fit", "load_balance"], gpus_per_node=2, load=0.25, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [policy["policy"] for policy in told["policies"]] == ["best_fit", "load_balance"]
    assert told["policies"][0]["finished"] == 5
    simulate_command(DATA / "tasks.csv", nodes=DATA / "nodes.csv", experiment="fill")
    assert "best_fit" in capsys.readouterr().out


def test_the_command_names_what_is_wrong() -> None:
    with pytest.raises(InvalidRequest, match="no strategy is called magic"):
        simulate_command(DATA / "jobs.csv", policy=["magic"])
    with pytest.raises(InvalidRequest, match="there is no file"):
        simulate_command(DATA / "nothing.csv")
