"""Shares of one GPU whose memory is watched: a task's processes count together, and who takes too much is stopped alone."""

from __future__ import annotations

from typing import Any

from agent_harness import SchedulerStandIn, poll_until
from hardware.cards import Card, lines

from crater_core.wire.resources import GrantView

SECONDS = 40
SHARE_MIB = 4_096
"""A process takes up to about 600 MiB for CUDA itself, which counts as its own."""


def _share(card: Card) -> GrantView:
    return GrantView(uuid=card.uuid, index=card.index, compute_milli=250, memory_mib=SHARE_MIB, sharing="time_slice")


def _give(scheduler: SchedulerStandIn, card: Card, name: str, *arguments: object) -> None:
    scheduler.give(name, card.holder(*arguments), devices=[_share(card)], env=card.environ, grace_ms=500)


def _holds(scheduler: SchedulerStandIn, name: str) -> Any:
    return poll_until(lambda: lines(scheduler.read_log_text(name)), SECONDS, f"what {name} says")


def test_the_memory_of_two_processes_counts_together(card: Card, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True, "compute_mode": "time_slice"})
    _give(scheduler, card, "a", "--hold", 2_700, "--hold", 2_700)
    end = scheduler.final("a", SECONDS)
    assert (end.status.value, end.reason.code.value) == ("failed", "gpu_memory_exceeded")
    assert end.reason.facts["limit_mib"] == SHARE_MIB
    assert 5_400 <= end.reason.facts["peak_mib"] < 5_400 + 2 * 1_024
    assert end.use.gpu_memory_peak_mib == end.reason.facts["peak_mib"]


def test_who_takes_too_much_is_stopped_and_its_neighbour_goes_on(card: Card, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True, "compute_mode": "time_slice"})
    _give(scheduler, card, "good", "--hold", 1_024)
    assert _holds(scheduler, "good")[0]["held_mib"] == 1_024
    _give(scheduler, card, "greedy", "--hold", 6_144)
    end = scheduler.final("greedy", SECONDS)
    assert (end.reason.code.value, end.reason.facts["peak_mib"] >= 6_144) == ("gpu_memory_exceeded", True)
    assert not [report for report in scheduler.reports_of("good") if report.reason is not None or report.status.ended]
    device = next(device for device in scheduler.declaration.devices if device.uuid == card.uuid)
    assert device.healthy


def test_what_two_tasks_use_never_adds_up_to_more_than_the_card(card: Card, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True, "compute_mode": "time_slice"})
    for name in ("a", "b"):
        _give(scheduler, card, name, "--hold", 1_024, "--busy")

    def both() -> Any:
        uses = scheduler.heartbeats[-1]["uses"] if scheduler.heartbeats else {}
        return uses if all(uses.get(name, {}).get("gpu_percent_milli") for name in ("a", "b")) else None

    uses = poll_until(both, SECONDS, "the use of both")
    assert sum(use["gpu_percent_milli"] for use in uses.values()) <= 1_000
    assert all(1_024 <= use["gpu_memory_mib"] < SHARE_MIB for use in uses.values())
