"""A task with a whole GPU: it sees its own card and no other, its use is counted, and the card is watched for others."""

from __future__ import annotations

from typing import Any

import pytest
from agent_harness import SchedulerStandIn, poll_until
from hardware.cards import Card, lines

from crater_core.wire.resources import GrantView

SECONDS = 40


def _whole(card: Card) -> GrantView:
    return GrantView(uuid=card.uuid, index=card.index, compute_milli=1000, memory_mib=card.memory_mib, sharing="exclusive")


def _said(scheduler: SchedulerStandIn, allocation: str, processes: int = 1) -> list[dict[str, Any]]:
    def all_of_it() -> list[dict[str, Any]]:
        text = scheduler.read_log_text(allocation)
        return lines(text) if text.count("\n") == processes else []

    scheduler.running(allocation)
    return poll_until(all_of_it, SECONDS, f"what {allocation} says")


def _device(scheduler: SchedulerStandIn, card: Card) -> Any:
    return next(device for device in scheduler.declaration.devices if device.uuid == card.uuid)


@pytest.mark.parametrize("form", ["uuid", "index"])
def test_a_task_sees_its_card_and_no_other(card: Card, begin, scheduler: SchedulerStandIn, form: str):
    begin()
    assert abs(_device(scheduler, card).memory_mib - card.memory_mib) <= 1
    command = card.holder("--hold", 256)
    scheduler.give("a", command, devices=[_whole(card)], gpu_visible_devices=form, env=card.environ)
    (said,) = _said(scheduler, "a")
    assert (said["uuids"], said["code"], said["held_mib"]) == ([card.uuid], 0, 256)
    # What CUDA counts as a card's memory leaves out what the driver keeps for itself.
    assert card.memory_mib * 0.9 < said["memory_mib"] <= card.memory_mib


def test_a_task_without_a_gpu_finds_none(card: Card, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", card.holder("--hold", 256), env=card.environ)
    scheduler.final("a", SECONDS)
    (said,) = lines(scheduler.read_log_text("a"))
    assert (said["code"], "uuids" in said) == (100, False)


def test_what_a_task_uses_is_counted_for_it(card: Card, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", card.holder("--hold", 1_024, "--busy"), devices=[_whole(card)], env=card.environ, grace_ms=500)
    _said(scheduler, "a")

    def used() -> Any:
        use = scheduler.heartbeats[-1]["uses"].get("a", {}) if scheduler.heartbeats else {}
        return use if use.get("gpu_busy_ms") and use.get("gpu_memory_mib", 0) >= 1_024 else None

    use = poll_until(used, SECONDS, "its use")
    assert 1_024 <= use["gpu_memory_mib"] < 4_096
    assert 0 < use["gpu_percent_milli"] <= 1_000


def test_a_card_used_from_outside_is_set_aside_and_given_out_again(card: Card, begin, scheduler: SchedulerStandIn):
    begin()
    assert _device(scheduler, card).healthy
    stranger = card.outside("--hold", 1_024)
    try:
        poll_until(lambda: not _device(scheduler, card).healthy, SECONDS, "the quarantine")
        assert f"in use from outside Crater by pid {stranger.pid} of " in _device(scheduler, card).unwell
        scheduler.give("a", card.holder("--hold", 256), devices=[_whole(card)], env=card.environ)
        end = scheduler.final("a", SECONDS)
        assert (end.reason.code.value, end.reason.facts["retryable"]) == ("start_failed", 1)
    finally:
        stranger.kill()
        stranger.wait()
    poll_until(lambda: _device(scheduler, card).healthy, SECONDS, "its release")
    scheduler.give("b", card.holder("--hold", 256), devices=[_whole(card)], env=card.environ)
    assert _said(scheduler, "b")[0]["code"] == 0


def test_what_one_task_held_is_there_for_the_next(card: Card, begin, scheduler: SchedulerStandIn):
    """Nearly all of the card, twice: a next task starts only once the driver has given back what the last one held."""
    begin()
    most = card.memory_mib * 3 // 4
    for name in ("first", "second"):
        scheduler.give(name, card.holder("--hold", most), devices=[_whole(card)], env=card.environ, grace_ms=500)
        assert _said(scheduler, name)[0]["held_mib"] == most
        scheduler.change(name, stop=True)
        assert scheduler.final(name, SECONDS).status.value == "cancelled"
    assert all(device.healthy for declaration in scheduler.declarations for device in declaration.devices)
