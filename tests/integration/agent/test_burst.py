"""Many leases at once: every one runs once, and starts do not wait for each other."""

from __future__ import annotations

from pathlib import Path

from agent_harness import SchedulerStandIn


def test_a_burst_of_leases_runs_each_of_them_once(start, place: Path, scheduler: SchedulerStandIn):
    start()
    assert scheduler.declaration
    names = [f"b{number}" for number in range(60)]
    for name in names:
        scheduler.give(name, ["sh", "-c", f"echo {name} >> {place}/ran"], cpu_milli=100)
    ends = [scheduler.final(name, 60) for name in names]
    assert {end.status.value for end in ends} == {"succeeded"}
    assert sorted((place / "ran").read_text().split()) == sorted(names)
    assert all(len([r for r in scheduler.reports_of(name) if r.status.ended]) == 1 for name in names)
