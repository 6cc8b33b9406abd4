"""Fair share looks back, and forgets; weights count; waiting raises a task past those with more."""

from __future__ import annotations

from builders import a_node, a_snapshot, a_task, commit

from crater_core.lifecycle import apply
from crater_core.lifecycle.inputs import Planned, Report
from crater_core.model.allocation import AllocationStatus
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import explain, project_shares, schedule
from crater_core.scheduling.order import passed_at_most_ms

DAY_MS = 86_400_000


def run(snapshot: Snapshot, task: str, from_ms: int, to_ms: int) -> None:
    """A whole life through the real decisions, so that the average is kept."""
    snapshot.advance([a_task(task, project=task[0], cpu=4000, at_ms=from_ms)])
    plan = schedule(snapshot, from_ms)
    snapshot.advance(apply(snapshot, Planned(plan, (f"a-{task}",)), from_ms).puts)
    allocation = snapshot.allocations[f"a-{task}"]
    ended = Report(allocation.node, allocation.id, allocation.token, AllocationStatus.SUCCEEDED, to_ms)
    snapshot.advance(apply(snapshot, ended, to_ms).puts)


def order(snapshot: Snapshot, now_ms: int) -> list[str]:
    return [placement.task for placement in schedule(snapshot, now_ms).placements]


def test_a_project_that_held_more_lately_goes_later() -> None:
    snapshot = a_snapshot([a_node(cpu=8)])
    run(snapshot, "x1", 0, DAY_MS)
    snapshot.advance([a_task("x2", project="x", at_ms=DAY_MS), a_task("y1", project="y", at_ms=DAY_MS + 1)])
    assert order(snapshot, DAY_MS + 1) == ["y1", "x2"]


def test_an_hour_yesterday_counts_more_than_an_hour_last_month() -> None:
    snapshot = a_snapshot([a_node(cpu=8)])
    run(snapshot, "x1", 0, 2 * DAY_MS)
    run(snapshot, "y1", 30 * DAY_MS, 31 * DAY_MS)
    snapshot.advance([a_task("y2", project="y", at_ms=31 * DAY_MS), a_task("x2", project="x", at_ms=31 * DAY_MS)])
    assert order(snapshot, 31 * DAY_MS) == ["x2", "y2"]


def test_with_no_half_life_only_what_is_held_now_counts() -> None:
    snapshot = a_snapshot([a_node(cpu=8)], settings=Settings(fair_share_half_life_ms=0))
    run(snapshot, "x1", 0, DAY_MS)
    snapshot.advance([a_task("x2", project="x", at_ms=DAY_MS), a_task("y1", project="y", at_ms=DAY_MS + 1)])
    assert order(snapshot, DAY_MS + 1) == ["x2", "y1"]
    assert snapshot.past == {}


def test_the_average_halves_with_each_half_life() -> None:
    snapshot = a_snapshot([a_node(cpu=8)], settings=Settings(fair_share_half_life_ms=DAY_MS))
    run(snapshot, "x1", 0, DAY_MS)
    averages = [project_shares(snapshot, (1 + days) * DAY_MS)["x"].average.cpu_milli for days in range(4)]
    assert averages == [2000, 1000, 500, 250]


def test_twice_the_weight_deserves_twice_the_share() -> None:
    snapshot = a_snapshot([a_node(cpu=9)], settings=Settings(project_weights={"x": 2000}))
    snapshot.advance([a_task(f"{project}{i}", project=project, at_ms=i) for project in "xy" for i in range(9)])
    assert sorted(name[0] for name in order(snapshot, 0)) == ["x"] * 6 + ["y"] * 3


def test_shares_are_shown_with_weight_and_average() -> None:
    snapshot = a_snapshot([a_node(cpu=8)], [a_task("x1", project="x", cpu=2000)], settings=Settings(project_weights={"x": 500}))
    commit(snapshot, schedule(snapshot, 0))
    share = project_shares(snapshot, 0)["x"]
    assert (share.weight_milli, share.held.cpu_milli, share.held_milli, share.share_milli) == (500, 2000, 250, 500)


def test_waiting_raises_a_task_before_a_more_important_one_that_came_much_later() -> None:
    settings = Settings(raise_after_ms=1000)
    tasks = [a_task("low", priority=35, cpu=8000), a_task("high", priority=50, cpu=8000, at_ms=1500)]
    snapshot = a_snapshot([a_node(cpu=8)], tasks, settings=settings)
    assert order(snapshot, 1999) == ["high"]
    assert order(snapshot, 2000) == ["low"]
    assert [explain(snapshot, name, 2000).position for name in ("low", "high")] == [1, 2]


def test_within_one_raise_the_share_still_decides() -> None:
    snapshot = a_snapshot([a_node()], [a_task("x1", project="x", cpu=2000)], settings=Settings(raise_after_ms=1000))
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("x2", project="x", at_ms=0), a_task("y1", project="y", at_ms=900)])
    assert order(snapshot, 950) == ["y1", "x2"]


def test_a_lane_whose_tasks_are_raised_differently_is_looked_at_in_turn() -> None:
    settings = Settings(raise_after_ms=1000, cycle_tasks_max=3)
    tasks = [a_task("old", at_ms=0), a_task("new", at_ms=1500), a_task("mid", at_ms=1000, priority=55)]
    assert order(a_snapshot([a_node()], tasks, settings=settings), 2000) == ["old", "mid", "new"]


def test_the_place_in_the_queue_counts_those_raised_before_it() -> None:
    settings = Settings(raise_after_ms=1000)
    tasks = [a_task(f"t{i}", at_ms=500 * i, priority=priority, cpu=9000) for i, priority in enumerate([30, 40, 40, 50, 45])]
    snapshot = a_snapshot([a_node()], tasks, settings=settings)
    for now_ms in (2000, 2600, 9999):
        raised = {task.id: task.spec.priority + (now_ms - task.queued_at_ms) // 1000 * 10 for task in tasks}
        queue = sorted(raised, key=lambda name: (-raised[name], name))
        assert [explain(snapshot, name, now_ms).position for name in queue] == [1, 2, 3, 4, 5]


def test_the_bound_on_being_passed_is_told() -> None:
    assert passed_at_most_ms(50, Settings(raise_after_ms=1000)) == 6000
    assert passed_at_most_ms(0, Settings(raise_after_ms=0)) is None


def test_a_project_that_has_left_fades_away() -> None:
    snapshot = a_snapshot([a_node(cpu=8)], settings=Settings(fair_share_half_life_ms=1000))
    run(snapshot, "x1", 0, 1000)
    assert "x" in project_shares(snapshot, 2000)
    assert "x" not in project_shares(snapshot, 100_000)
