"""Who goes first, and what happens to those behind."""

from __future__ import annotations

from builders import a_node, a_snapshot, a_task, commit, end

from crater_core.model.snapshot import Settings, Snapshot
from crater_core.scheduling import explain, schedule


def order(snapshot: Snapshot) -> list[str]:
    return [placement.task for placement in schedule(snapshot, 0).placements]


def test_higher_priority_goes_first_then_the_older() -> None:
    tasks = [a_task("old", at_ms=1), a_task("new", at_ms=2), a_task("urgent", at_ms=3, priority=90)]
    assert order(a_snapshot([a_node()], tasks)) == ["urgent", "old", "new"]


def test_equals_go_by_id() -> None:
    assert order(a_snapshot([a_node()], [a_task("b"), a_task("c"), a_task("a")])) == ["a", "b", "c"]


def test_a_project_that_holds_less_goes_first() -> None:
    snapshot = a_snapshot([a_node()], [a_task("x1", project="x", cpu=2000)])
    commit(snapshot, schedule(snapshot, 0))
    snapshot.advance([a_task("x2", project="x", at_ms=1), a_task("y1", project="y", at_ms=2)])
    assert order(snapshot) == ["y1", "x2"]


def test_projects_take_turns_within_one_cycle() -> None:
    tasks = [a_task(f"x{i}", project="x", at_ms=i) for i in range(3)] + [a_task(f"y{i}", project="y", at_ms=9) for i in range(3)]
    assert order(a_snapshot([a_node()], tasks)) == ["x0", "y0", "x1", "y1", "x2", "y2"]


def test_a_task_that_fits_passes_one_that_does_not() -> None:
    snapshot = a_snapshot([a_node(cpu=2)], [a_task("wide", cpu=2000), a_task("small", cpu=1000, at_ms=9)])
    snapshot.advance([a_task("first", cpu=1000, priority=99)])
    assert order(snapshot) == ["first", "small"]


def test_a_cycle_looks_at_no_more_than_its_bound() -> None:
    tasks = [a_task(f"t{i}", at_ms=i) for i in range(5)]
    plan = schedule(a_snapshot([a_node()], tasks, settings=Settings(cycle_tasks_max=3)), 0)
    assert [placement.task for placement in plan.placements] == ["t0", "t1", "t2"]


def test_position_counts_those_ahead() -> None:
    tasks = [a_task("a", cpu=8000), a_task("b", cpu=8000, at_ms=1), a_task("c", cpu=8000, at_ms=2), a_task("d", priority=99)]
    snapshot = a_snapshot([a_node()], tasks)
    assert [explain(snapshot, task, 0).position for task in "dabc"] == [1, 2, 3, 4]
    commit(snapshot, schedule(snapshot, 0))
    end(snapshot, "d")
    assert explain(snapshot, "b", 0).position == 2
