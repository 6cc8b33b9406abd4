"""Traces are read as written, and a replay is the scheduler's own decisions on a virtual clock."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import a_node, a_spec

from crater_core.cli.simulate import simulate as simulate_command
from crater_core.errors import InvalidRequest
from crater_core.model.quota import Limits, QuotaPolicy
from crater_core.model.resources import GpuRequest
from crater_core.model.snapshot import Settings
from crater_core.simulation import (
    Arrival,
    Shape,
    Trace,
    fill,
    inflated,
    read_jobs,
    read_openb,
    read_trace,
    simulate,
    simulate_partitions,
    with_checkpoints,
    with_known_ends,
)
from crater_core.simulation.figures import write_plots
from crater_core.simulation.loaders import read_nodes
from crater_core.simulation.traces import split_by_project

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


HEADER = "vc,arrival_s,num_gpus,duration_v100_s"


@pytest.mark.parametrize(
    ("header", "line", "why"),
    [
        (HEADER, "red,0,-1,10", "line 2, column num_gpus: a number must not be negative, found '-1'"),
        (HEADER, "red,0,1.5,10", "line 2, column num_gpus: a whole number is expected"),
        (HEADER, "red,soon,1,10", "line 2, column arrival_s: a number is expected, found 'soon'"),
        (HEADER, "red,0,1,", "line 2, column duration_v100_s: a value is missing"),
        (HEADER, "red,0,1", "line 2: 3 cells, the header has 4"),
        (HEADER + ",colour", "red,0,1,10,blue", "line 1: unknown column 'colour'"),
        (HEADER, "", "has a header and no rows"),
        ("vc,arrival_s,num_gpus", "red,0,1", "lacks the columns duration_v100_s"),
        ("a,b", "1,2", "has no form that is known"),
        ("", "", "is empty"),
    ],
)
def test_what_is_wrong_in_a_trace_is_told_with_file_line_and_column(header: str, line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"{header}\n{line}\n" if header else "")
    with pytest.raises(InvalidRequest) as caught:
        read_trace(file)
    assert str(file) in caught.value.message
    assert why in caught.value.message


def test_every_known_form_is_told_by_its_header(tmp_path: Path) -> None:
    forms = {
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval": "0,8,30,133,vgg11,147,23",
        "instance_sn,role,app_name,cpu_request,gpu_request,memory_request,disk_request,creation_time,deletion_time": (
            "i-0,HN,app,12,1,120.0,640.0,,"
        ),
    }
    file, found = tmp_path / "trace.csv", []
    for header, line in forms.items():
        file.write_text(f"{header}\n{line}\n")
        (arrival,) = read_trace(file, shape=Shape(2)).arrivals
        found.append((arrival.spec.name, arrival.spec.request.gpu, arrival.runs_ms))
    assert found == [("vgg11", GpuRequest(8), 147_000), ("app", GpuRequest(1), 365 * 86_400_000)]
    file.write_text("num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,16,4,128,254\n")
    assert [len(node.devices) for node in read_nodes(file)] == [4] * 32


def test_partitions_share_out_the_nodes_by_the_gpu_time_asked_for() -> None:
    big, small = (replace(a_spec(gpu=1000), project=name) for name in ("big", "small"))
    trace = a_trace(Arrival(big, 0, 90_000), Arrival(big, 0, 90_000), Arrival(small, 0, 20_000), nodes=4)
    assert [len(part.nodes) for part in split_by_project(trace)] == [3, 1]
    outcome = simulate_partitions(trace, Settings(passing="none"))
    assert (outcome.tasks, outcome.finished, sorted(outcome.waits_ms)) == (3, 3, [0, 0, 0])


def test_ctrl_c_ends_a_replay_with_what_there_is_by_then() -> None:
    def press(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    trace = a_trace(*(Arrival(a_spec(gpu=1000), at * 1000, 500) for at in range(4)))
    outcome = simulate(trace, Settings(), progress=press)
    assert (outcome.interrupted, outcome.finished) == (True, 1)
    assert 0 < outcome.allocation_ratio <= 1


def test_room_that_lies_free_while_somebody_waits_is_fragmentation() -> None:
    """Two GPUs, one busy; a task for both waits for 900 of the 1,000 ms in which tasks come: one of two lies free."""
    one, two = a_spec(gpu=1000, cpu=1), a_spec(gpu=2000, cpu=1)
    outcome = simulate(
        a_trace(Arrival(one, 0, 2000), Arrival(two, 100, 10), Arrival(one, 1000, 10), gpus=2), Settings(passing="none")
    )
    assert (outcome.fragmentation, outcome.allocation_ratio) == (0.45, 0.5)


def test_a_preempted_task_counts_what_it_lost_as_waiting_and_not_as_use() -> None:
    low, high = a_spec(gpu=1000, priority=10), a_spec(gpu=1000, priority=90, strategy="preemptive")
    outcome = simulate(a_trace(Arrival(low, 0, 100_000), Arrival(high, 70_000, 1000)), Settings())
    assert sorted(outcome.waits_ms) == [0, 71_000]
    assert (outcome.allocation_ratio, outcome.utilisation) == (1.0, 0.0)


def test_foretold_run_times_are_learned_while_the_trace_goes_on() -> None:
    """As with backfill, but nobody declares anything: what two earlier tasks took tells that the short one may pass."""
    busy, head, short = (
        replace(a_spec(gpu=gpu, cpu=1), name=name) for name, gpu in (("busy", 1000), ("head", 2000), ("short", 1000))
    )
    past = (Arrival(busy, 0, 100_000), Arrival(short, 0, 50_000))
    now = (Arrival(busy, 200_000, 100_000), Arrival(head, 201_000, 1000), Arrival(short, 202_000, 50_000))
    told = simulate(a_trace(*past, *now, gpus=2), Settings(hold_after_ms=10**9))
    assert (told.started_ms["t0000004"], told.started_ms["t0000003"]) == (202_000, 300_000)
    blind = simulate(a_trace(*past, *now, gpus=2), Settings(hold_after_ms=0, foretell=False))
    assert blind.started_ms["t0000004"] > 300_000


def test_shorter_tasks_go_first_as_far_as_that_is_asked_for() -> None:
    long, short = (replace(a_spec(gpu=1000), time_limit_ms=limit) for limit in (90_000, 1000))
    trace = a_trace(Arrival(a_spec(gpu=1000), 0, 5000), Arrival(long, 1, 90_000), Arrival(short, 2, 1000))
    assert simulate(trace, Settings()).started_ms["t0000002"] > 90_000
    assert simulate(trace, Settings(short_first_milli=1000)).started_ms["t0000002"] == 5000


def test_plots_and_tables_are_written_beside_each_other(tmp_path: Path) -> None:
    from pyarrow import parquet

    trace = with_known_ends(read_jobs(DATA / "jobs.csv", gpus_per_node=2))
    outcomes = [simulate(trace, Settings(passing=passing), name=passing) for passing in ("none", "free")]
    written = write_plots(tmp_path / "plots", outcomes)
    assert [path.name for path in written] == [
        *("allocation.png", "waits.png", "figures.png"),
        *("policies.parquet", "tasks.parquet", "timeline.parquet"),
    ]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written[:3])
    assert parquet.read_table(written[3]).column("policy").to_pylist() == ["none", "free"]
    assert parquet.read_table(written[4]).num_rows == sum(outcome.finished for outcome in outcomes) > 0


def test_without_the_extra_plots_say_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidRequest, match=r"needs the extra \[plots\]"):
        write_plots(tmp_path, [])


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


@pytest.mark.parametrize(("every_ms", "lost_ms", "wait_ms"), [(None, 70_000, 71_000), (30_000, 10_000, 11_000), (0, 0, 1_000)])
def test_a_task_that_saves_its_work_goes_on_from_there(every_ms: int | None, lost_ms: int, wait_ms: int) -> None:
    low = a_spec(gpu=1000, priority=10, checkpoint_every_ms=every_ms)
    high = a_spec(gpu=1000, priority=90, strategy="preemptive")
    outcome = simulate(a_trace(Arrival(low, 0, 100_000), Arrival(high, 70_000, 1000)), Settings())
    assert (outcome.preemptions, outcome.lost_work_ms, sorted(outcome.waits_ms)) == (1, lost_ms, [0, wait_ms])
    assert [run.until_start_ms for run in outcome.runs] == [0, 0]


def test_each_stop_of_a_gang_saves_its_time_once() -> None:
    low = a_spec(gpu=1000, members=2, priority=10, checkpoint_every_ms=30_000)
    high = a_spec(gpu=1000, members=2, priority=90, strategy="preemptive")
    arrivals = (Arrival(low, 0, 300_000), Arrival(high, 70_000, 1000), Arrival(high, 150_000, 1000))
    outcome = simulate(a_trace(*arrivals, gpus=2), Settings())
    # It keeps 60 s of 70, and 60 s of the 79 since it went on at 71 s; twice the others hold it up for a second.
    assert (outcome.preemptions, outcome.lost_work_ms) == (4, 2 * (10_000 + 19_000))
    assert max(outcome.waits_ms) == 10_000 + 19_000 + 2_000


def test_checkpoints_are_laid_over_a_trace_but_not_over_what_a_task_says() -> None:
    trace = with_checkpoints(a_trace(Arrival(a_spec(), 0, 1), Arrival(a_spec(checkpoint_every_ms=7), 0, 1)), 600_000)
    assert [arrival.spec.checkpoint_every_ms for arrival in trace.arrivals] == [600_000, 7]


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
    policies = ["best_fit", "load_balance", "best_fit,passing=none,partition=project"]
    simulate_command(DATA / "jobs.csv", policy=policies, gpus_per_node=2, cores_per_node=16, load=0.25, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert [policy["policy"] for policy in told["policies"]] == policies
    assert [policy["finished"] for policy in told["policies"]][:2] == [5, 5]
    simulate_command(DATA / "tasks.csv", nodes=str(DATA / "nodes.csv"), experiment="fill")
    assert "best_fit" in capsys.readouterr().out


def test_the_command_replays_tasks_as_saving_their_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    columns = "task,name,project,user,submitted_at_ms,ran_ms,cpu_milli,memory_bytes,started_at_ms,priority,strategy"
    rows = ["a,low,p,u,0,100000,1000,1,0,10,", "b,high,p,u,70000,1000,1000,1,70000,90,"]
    history = tmp_path / "history.csv"
    history.write_text("\n".join([f"{columns},checkpoint_every_ms", f"{rows[0]},", f"{rows[1]},5"]))
    assert [arrival.spec.checkpoint_every_ms for arrival in read_trace(history).arrivals] == [None, 5]
    shape: dict[str, Any] = {"nodes": "1", "gpus_per_node": 0, "cores_per_node": 1}
    lost: list[int] = []
    for every in (None, "30s"):
        simulate_command(history, policy=["preemptive"], checkpoint_every=every, as_json=True, **shape)
        lost.append(json.loads(capsys.readouterr().out)["policies"][0]["lost_work_ms"])
    assert lost == [70_000, 10_000]
    with pytest.raises(InvalidRequest, match="checkpoint_every has an unknown unit 'x' in '3x'"):
        simulate_command(history, checkpoint_every="3x")


def test_the_command_names_what_is_wrong() -> None:
    with pytest.raises(InvalidRequest, match="no strategy is called magic"):
        simulate_command(DATA / "jobs.csv", policy=["magic"])
    with pytest.raises(InvalidRequest, match="there is no file"):
        simulate_command(DATA / "nothing.csv")
    for policy, why in {
        "best_fit,magic=1": "keys are passing, partition",
        "best_fit,short_first=-1": "must not be negative",
        "best_fit,passing=some": "not a key with a value that it takes",
    }.items():
        with pytest.raises(InvalidRequest, match=why):
            simulate_command(DATA / "jobs.csv", policy=[policy])
