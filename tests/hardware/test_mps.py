"""Shares of one GPU by MPS: limits that hold, programs past the daemon, daemons that die, and nothing left at the end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import mps
import pytest
from agent_harness import AgentProcess, SchedulerStandIn, poll_until
from hardware.cards import Card, lines

from crater_core.wire.resources import GrantView

SECONDS = 20
SHARE_MIB = 4_096
MPS = {"enabled": True, "compute_mode": "mps"}


def _share(card: Card, compute_milli: int = 250, memory_mib: int = SHARE_MIB) -> GrantView:
    return GrantView(uuid=card.uuid, index=card.index, compute_milli=compute_milli, memory_mib=memory_mib, sharing="mps")


def _give(scheduler: SchedulerStandIn, card: Card, name: str, command: list[str], **share: int) -> None:
    env = {key: value for key, value in card.environ.items() if key != "PATH"}
    scheduler.give(name, command, devices=[_share(card, **share)], env=env, grace_ms=500)


def _holds(scheduler: SchedulerStandIn, name: str, processes: int = 1) -> list[dict[str, Any]]:
    def said() -> list[dict[str, Any]]:
        text = scheduler.read_log_text(name)
        return lines(text) if text.count("\n") == processes else []

    scheduler.running(name, SECONDS)
    return poll_until(said, SECONDS, f"what {name} says")


def _unwell(scheduler: SchedulerStandIn, card: Card) -> str:
    return next(device for device in scheduler.declaration.devices if device.uuid == card.uuid).unwell


def _daemons(agent: AgentProcess) -> dict[int, str]:
    """The processes of MPS that this agent has started, by pid, with their names."""
    found = {}
    mark = b"CRATER_MPS_OF=" + os.fsencode(agent.data_dir)
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue
    return {pid: name for pid, name in found.items() if name.startswith("nvidia-cuda-mps")}


def _places(agent: AgentProcess) -> list[Path]:
    return list(Path("/run/crater-mps").glob(agent.group_name.rpartition("-")[2]))


def _server(agent: AgentProcess) -> int:
    """On a card the daemon's servers have its environment; which of the two a process is, its parent tells."""
    found = _daemons(agent)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return next(pid for pid, parent in parents.items() if parent in found)


def test_two_shares_run_beside_each_other_within_their_limits(card: Card, begin, scheduler: SchedulerStandIn):
    agent = begin(gpu_sharing=MPS)
    _give(scheduler, card, "a", card.holder("--hold", 1_024))
    _give(scheduler, card, "b", card.holder("--hold", 1_024, "--more", 8_192), compute_milli=500, memory_mib=6_144)
    assert _holds(scheduler, "a")[0]["held_mib"] == 1_024
    over = _holds(scheduler, "b")[0]
    # Out of memory inside its own share, though the card has plenty.
    assert over["code"] == 2
    assert 4_096 <= over["held_mib"] <= 6_144
    environ = dict(pair.split("=", 1) for pair in Path(f"/proc/{over['pid']}/environ").read_text().split("\0") if "CUDA_" in pair)
    assert environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    assert environ["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=6144M"
    assert environ["CUDA_VISIBLE_DEVICES"] == card.uuid
    assert len(_daemons(agent)) == 2
    assert not [r for name in ("a", "b") for r in scheduler.reports_of(name) if r.status.ended]
    if card.stand_in is not None:
        told = mps.commands(card.stand_in)
        # The ceiling is the largest share there, and each word was read back.
        ceilings = [word for word in told if word.startswith("set_default_active")]
        assert ceilings[-1] == "set_default_active_thread_percentage 50"
        assert [word for word in told if word.startswith("set_default_device")][
            -1
        ] == "set_default_device_pinned_mem_limit 0 6144M"
        assert "get_default_device_pinned_mem_limit 0" in told


def test_when_the_largest_share_has_ended_the_ceiling_is_that_of_those_that_are_left(
    card: Card, begin, scheduler: SchedulerStandIn
):
    begin(gpu_sharing=MPS)
    _give(scheduler, card, "small", card.holder("--hold", 512))
    _give(scheduler, card, "large", card.holder("--hold", 512), compute_milli=500, memory_mib=6_144)
    _holds(scheduler, "small")
    _holds(scheduler, "large")
    scheduler.change("large", stop=True)
    scheduler.final("large", SECONDS)
    if card.stand_in is not None:
        stand_in = card.stand_in
        lowered = {"set_default_active_thread_percentage 25", f"set_default_device_pinned_mem_limit 0 {SHARE_MIB}M"}

        def after_the_largest() -> set[str]:
            told = mps.commands(stand_in)
            largest = len(told) - told[::-1].index("set_default_active_thread_percentage 50")
            return lowered & set(told[largest:])

        poll_until(lambda: after_the_largest() == lowered, SECONDS, "the ceiling lowered")
    assert not [report for report in scheduler.reports_of("small") if report.status.ended]


def test_the_limit_is_on_the_sum_of_a_tasks_processes(card: Card, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing=MPS)
    _give(scheduler, card, "a", card.holder("--hold", 3_000, "--hold", 3_000))
    end = scheduler.final("a", SECONDS)
    assert (end.status.value, end.reason.code.value) == ("failed", "gpu_memory_exceeded")
    assert (end.reason.facts["limit_mib"], end.reason.facts["peak_mib"] >= 6_000) == (SHARE_MIB, True)


def test_a_program_past_mps_is_stopped_and_its_neighbour_goes_on(card: Card, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing=MPS)
    _give(scheduler, card, "good", card.holder("--hold", 512))
    _holds(scheduler, "good")
    past = ["env", "-u", "CUDA_MPS_PIPE_DIRECTORY", *card.holder("--hold", 512)]
    _give(scheduler, card, "past", past)
    pid = _holds(scheduler, "past")[0]["pid"]
    end = scheduler.final("past", SECONDS)
    assert (end.status.value, end.reason.code.value) == ("failed", "gpu_without_mps")
    assert end.reason.facts == {"device": str(card.index), "pid": pid}
    assert not [report for report in scheduler.reports_of("good") if report.status.ended]


def test_a_server_that_dies_ends_its_tasks_and_the_card_is_out_until_a_probe_passes(
    card: Card, begin, scheduler: SchedulerStandIn
):
    agent = begin(gpu_sharing=MPS)
    _give(scheduler, card, "a", card.holder("--hold", 512))
    _holds(scheduler, "a")
    server = _server(agent)
    if card.stand_in is not None:
        mps.steer(card.stand_in, "fault")
    os.kill(server, signal.SIGKILL)
    end = scheduler.final("a", SECONDS)
    assert (end.status.value, end.reason.code.value) == ("lost", "gpu_fault")
    assert end.reason.facts["why"] == f"its MPS server (pid {server}) has ended"
    if card.stand_in is not None:
        poll_until(lambda: "CUDA error 805" in _unwell(scheduler, card), SECONDS, "the card out, with the reason")
        mps.steer(card.stand_in)
    poll_until(lambda: not _unwell(scheduler, card), SECONDS, "the card back")
    _give(scheduler, card, "b", card.holder("--hold", 512))
    assert _holds(scheduler, "b")[0]["code"] == 0


def test_a_daemon_that_dies_ends_its_tasks_and_one_that_is_late_does_not(card: Card, begin, scheduler: SchedulerStandIn):
    agent = begin(gpu_sharing=MPS)
    _give(scheduler, card, "a", card.holder("--hold", 512))
    _holds(scheduler, "a")
    if card.stand_in is not None:
        mps.steer(card.stand_in, "mute")
        asked = len(mps.commands(card.stand_in))
        poll_until(lambda: len(mps.commands(card.stand_in)) >= asked + 2, SECONDS, "a question without an answer, and one more")
        mps.steer(card.stand_in)
    _give(scheduler, card, "b", card.holder("--hold", 512))
    _holds(scheduler, "b")
    assert not [report for report in scheduler.reports_of("a") if report.status.ended]
    server = _server(agent)
    (daemon,) = set(_daemons(agent)) - {server}
    os.kill(daemon, signal.SIGKILL)
    for name in ("a", "b"):
        end = scheduler.final(name, SECONDS)
        assert (end.status.value, end.reason.code.value) == ("lost", "gpu_fault")
    poll_until(lambda: not _places(agent) and not _daemons(agent), SECONDS, "nothing left")


def test_a_daemon_outlives_the_agent_and_goes_with_its_last_task(card: Card, begin, scheduler: SchedulerStandIn):
    agent = begin(gpu_sharing=MPS)
    _give(scheduler, card, "a", card.holder("--hold", 512))
    _holds(scheduler, "a")
    before = _daemons(agent)
    agent.kill()
    agent.restart()
    poll_until(lambda: len(scheduler.declarations) > 1, SECONDS, "the new agent")
    _give(scheduler, card, "b", card.holder("--hold", 512))
    _holds(scheduler, "b")
    assert _daemons(agent) == before
    assert not [report for report in scheduler.reports_of("a") if report.status.ended]
    for name in ("a", "b"):
        scheduler.change(name, stop=True)
    for name in ("a", "b"):
        scheduler.final(name, SECONDS)
    poll_until(lambda: not _daemons(agent) and not _places(agent), SECONDS, "nothing left")


def test_a_client_is_let_go_before_it_is_killed(card: Card, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing=MPS)
    _give(scheduler, card, "good", card.holder("--hold", 512))
    stubborn = ["sh", "-c", 'trap "" TERM; "$@"', "sh", *card.holder("--hold", 512)]
    _give(scheduler, card, "stubborn", stubborn)
    pid = _holds(scheduler, "stubborn")[0]["pid"]
    _holds(scheduler, "good")
    scheduler.change("stubborn", stop=True)
    assert scheduler.final("stubborn", SECONDS).status.value == "cancelled"
    assert not [report for report in scheduler.reports_of("good") if report.status.ended]
    if card.stand_in is not None:
        gone = [word for word in mps.commands(card.stand_in) if word.startswith("terminate_client")]
        assert [word.split()[2] for word in gone] == [str(pid)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("refuse", "the MPS daemon did not start: Failed to start the daemon"),
        ("fault", "a CUDA program could not use it through MPS: cuInit failed with CUDA error 805"),
        ("deaf", "the MPS daemon was told 25 % of the threads and says '100.0'"),
    ],
)
@pytest.mark.parametrize("card", ["stand-in"], indirect=True)  # A real one does not go wrong when it is told to.
def test_without_a_daemon_that_works_no_share_is_given(begin, scheduler: SchedulerStandIn, card: Card, wrong: str, words: str):
    assert card.stand_in is not None
    mps.steer(card.stand_in, wrong)
    agent = begin(gpu_sharing=MPS)
    _give(scheduler, card, "a", card.holder("--hold", 512))
    end = scheduler.final("a", SECONDS)
    assert end.reason.code.value == "start_failed"
    assert end.reason.facts["why"] == f"GPU 0 cannot be shared by MPS: {words}"
    poll_until(lambda: _unwell(scheduler, card) == f"MPS: {words}", SECONDS, "the card out, with the reason")
    assert not _daemons(agent)
    mps.steer(card.stand_in)
    poll_until(lambda: not _unwell(scheduler, card), SECONDS, "the card back")
    _give(scheduler, card, "b", card.holder("--hold", 512))
    assert _holds(scheduler, "b")[0]["held_mib"] == 512
