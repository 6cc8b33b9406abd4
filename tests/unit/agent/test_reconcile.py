"""What an agent does next, rule by rule."""

from __future__ import annotations

from dataclasses import replace

from crater_agent.reconcile import (
    Exit,
    Finish,
    Forget,
    Kill,
    LeaseState,
    Phase,
    Report,
    Seen,
    Settings,
    Start,
    Stop,
    Want,
    Warn,
    outcome,
    reconcile,
)
from crater_core.model.allocation import AllocationStatus as Status
from crater_core.model.reason import Reason, ReasonCode

WANT = Want("a", token=1)
RUNS = Seen("a", token=1)
RENEWED = LeaseState()
NODE = Settings(node="n1")
LATE = LeaseState(silent_ms=29_000, heartbeat_timeout_ms=30_000)


def _one(want: Want | None, seen: Seen | None, now_ms: int = 1_000, lease: LeaseState = RENEWED) -> object:
    actions = reconcile([want] if want else [], [seen] if seen else [], now_ms, lease, NODE)
    assert len(actions) <= 1
    return actions[0] if actions else None


def test_a_new_lease_is_started():
    assert _one(WANT, None) == Start("a")


def test_what_runs_as_wanted_is_left_alone():
    assert _one(WANT, RUNS) is None


def test_a_lease_that_ran_here_and_is_unknown_is_lost_and_never_started_again():
    assert _one(replace(WANT, started=True), None) == Report(
        "a", 1, Status.LOST, Reason.of(ReasonCode.NODE_LOST, node="n1", silent_ms=0)
    )


def test_a_lease_that_is_to_stop_before_it_began_is_told_cancelled():
    action = _one(replace(WANT, stop=True), None)
    assert isinstance(action, Report)
    assert action.status is Status.CANCELLED


def test_nothing_is_started_when_the_lease_is_nearly_over():
    assert _one(WANT, None, lease=LATE) is None


def test_what_nobody_wants_is_stopped():
    action = _one(None, RUNS)
    assert isinstance(action, Stop)
    assert action.status is Status.CANCELLED


def test_nothing_is_unwanted_before_a_list_was_heard():
    assert reconcile(None, [RUNS], 1_000) == ()


def test_another_token_is_another_lease():
    action = _one(replace(WANT, token=2), RUNS)
    assert isinstance(action, Stop)


def test_the_new_lease_of_an_old_name_starts_when_the_old_one_is_forgotten():
    reported = replace(RUNS, phase=Phase.REPORTED)
    assert _one(replace(WANT, token=2), reported) == Forget("a")
    assert _one(replace(WANT, token=2), None) == Start("a")


def test_a_stop_has_the_grace_of_its_task_and_then_kills():
    stop = _one(replace(WANT, stop=True), replace(RUNS, grace_ms=5_000))
    assert isinstance(stop, Stop)
    assert (stop.status, stop.grace_ms) == (Status.CANCELLED, 5_000)
    stopping = replace(RUNS, phase=Phase.STOPPING, stop_asked_ms=1_000, stop_grace_ms=5_000)
    assert _one(WANT, stopping, 5_999) is None
    assert _one(WANT, stopping, 6_000) == Kill("a")


def test_what_is_left_of_an_ended_task_is_killed_before_it_counts_as_ended():
    gone = replace(RUNS, main_gone=True)
    assert _one(WANT, gone) == Kill("a")
    assert _one(WANT, replace(gone, lives=False)) == Finish("a")


def test_an_end_is_remembered_until_the_scheduler_has_taken_it_off_its_list():
    ended = replace(RUNS, phase=Phase.ENDED, lives=False)
    assert _one(WANT, ended) is None
    assert _one(None, ended) is None
    reported = replace(ended, phase=Phase.REPORTED)
    assert _one(WANT, reported) is None
    assert _one(None, reported) == Forget("a")


def test_a_time_limit_is_a_failure_with_its_number():
    limited = replace(RUNS, started_ms=500, time_limit_ms=1_000)
    assert _one(WANT, limited, 1_499) is None
    assert _one(WANT, limited, 1_500) == Stop("a", Status.FAILED, Reason.of(ReasonCode.TIME_LIMIT, limit_ms=1_000), 10_000)


def test_watched_memory_is_warned_of_then_stopped_with_the_numbers():
    over = replace(RUNS, memory_bytes=105, memory_limit_bytes=100)
    reason = Reason.of(ReasonCode.MEMORY_EXCEEDED, limit_bytes=100, peak_bytes=105)
    assert _one(WANT, over) == Warn("a", Reason(ReasonCode.OVER_MEMORY, reason.facts))
    warned = replace(over, over_memory_since_ms=1_000)
    assert _one(WANT, warned, 2_499) is None
    assert _one(WANT, warned, 2_500) == Stop("a", Status.FAILED, reason, 3_000)


def test_watched_memory_that_grows_fast_is_stopped_at_once():
    action = _one(WANT, replace(RUNS, memory_bytes=116, memory_limit_bytes=100))
    assert isinstance(action, Stop)
    assert action.grace_ms == 0


def test_memory_that_the_kernel_holds_is_not_judged_again():
    assert _one(WANT, replace(RUNS, memory_bytes=10**12, memory_limit_bytes=None)) is None


def test_more_disk_than_asked_for_is_warned_of_then_a_failure():
    over = replace(RUNS, disk_bytes=105, disk_limit_bytes=100)
    numbers = {"limit_bytes": 100, "peak_bytes": 105}
    assert _one(WANT, over) == Warn("a", Reason(ReasonCode.OVER_DISK, numbers))
    warned = replace(over, over_disk_since_ms=1_000)
    assert _one(WANT, warned, 10_999) is None
    assert _one(WANT, warned, 11_000) == Stop("a", Status.FAILED, Reason(ReasonCode.DISK_EXCEEDED, numbers), RUNS.grace_ms)


def test_much_more_disk_than_asked_for_is_a_failure_at_once():
    action = _one(WANT, replace(RUNS, disk_bytes=111, disk_limit_bytes=100))
    assert isinstance(action, Stop)
    assert action.reason == Reason.of(ReasonCode.DISK_EXCEEDED, limit_bytes=100, peak_bytes=111)


def test_a_scratch_space_that_cannot_grow_is_warned_of_before_it_is_full_and_never_stopped():
    held = replace(RUNS, disk_bytes=96, disk_limit_bytes=100, disk_held=True)
    assert _one(WANT, held) == Warn("a", Reason.of(ReasonCode.DISK_NEARLY_FULL, limit_bytes=100, peak_bytes=96))
    assert _one(WANT, replace(held, disk_bytes=102, over_disk_since_ms=0), 10**6) is None


def test_an_unhealthy_replica_fails_with_its_story():
    story = Reason.of(ReasonCode.UNHEALTHY, failures=3, why="it answers with status 500")
    action = _one(WANT, replace(RUNS, unhealthy=story))
    assert isinstance(action, Stop)
    assert (action.status, action.reason) == (Status.FAILED, story)


def test_silence_stops_what_may_be_started_elsewhere_so_early_that_its_grace_fits():
    lease = LeaseState(heartbeat_timeout_ms=30_000)
    assert (lease.kill_at_ms, lease.fence_at_ms(10_000), lease.fence_at_ms(1_000)) == (28_000, 20_500, 27_000)
    fence = _one(WANT, RUNS, lease=replace(lease, silent_ms=20_500))
    assert isinstance(fence, Stop)
    assert (fence.status, fence.reason.code, fence.grace_ms) == (Status.LOST, ReasonCode.NODE_LOST, 7_500)
    assert _one(WANT, RUNS, lease=replace(lease, silent_ms=20_499)) is None


def test_silence_kills_what_was_stopped_for_another_cause_and_still_lives():
    stopping = replace(RUNS, phase=Phase.STOPPING, stop_asked_ms=1_000, stop_grace_ms=60_000)
    assert _one(WANT, stopping, lease=LATE) == Kill("a")


def test_silence_keeps_what_will_not_be_started_elsewhere():
    assert _one(replace(WANT, restartable=False), replace(RUNS, restartable=False), lease=LATE) is None


def test_each_end_has_its_own_word():
    facts = {"limit_bytes": 100, "peak_bytes": 99, "silent_ms": 5}
    told = (Status.CANCELLED, Reason.of(ReasonCode.CANCELLED, by="x", why=""))
    assert outcome(Exit(code=0), None, facts, "n") == (Status.SUCCEEDED, Reason.of(ReasonCode.FINISHED))
    assert outcome(Exit(code=3), None, facts, "n") == (Status.FAILED, Reason.of(ReasonCode.EXIT_CODE, exit_code=3))
    assert outcome(Exit(signal=9), None, facts, "n") == (Status.FAILED, Reason.of(ReasonCode.SIGNALLED, signal=9))
    assert outcome(Exit(known=False), None, facts, "n") == (Status.FAILED, Reason.of(ReasonCode.EXIT_UNKNOWN))
    killed = Reason.of(ReasonCode.OOM_KILLED, limit_bytes=100, peak_bytes=99)
    assert outcome(Exit(signal=9, oom_kills=1), None, facts, "n") == (Status.FAILED, killed)
    assert outcome(Exit(code=0, oom_kills=1), None, facts, "n")[0] is Status.SUCCEEDED
    assert outcome(Exit(code=0), told, facts, "n") == told
    lost = Reason.of(ReasonCode.NODE_LOST, node="n", silent_ms=5)
    assert outcome(Exit(signal=15, fenced=True), None, facts, "n") == (Status.LOST, lost)


def test_nothing_is_started_while_something_unwanted_still_lives():
    left = Seen("b", token=1, grace_ms=3_600_000)
    stop = reconcile([WANT], [left], 1_000, RENEWED, NODE)
    assert [(type(action), action.allocation) for action in stop] == [(Stop, "b")]
    assert stop[0].grace_ms == 10_000, "what others have been given meanwhile does not wait for an hour"
    stopping = replace(left, phase=Phase.STOPPING, stop_asked_ms=1_000, stop_grace_ms=3_600_000)
    assert reconcile([WANT], [stopping], 2_000, RENEWED, NODE) == ()
    assert reconcile([WANT], [stopping], 11_000, RENEWED, NODE) == (Kill("b"),)
    assert reconcile([WANT], [replace(left, phase=Phase.ENDED, lives=False)], 12_000, RENEWED, NODE) == (Start("a"),)


# ---- GPUs

SHARE = replace(RUNS, gpu=1, gpu_memory_limit_mib=10_000)


def test_over_its_share_of_gpu_memory_it_is_warned_then_stopped_with_the_numbers():
    over = replace(SHARE, gpu_memory_mib=11_000)
    facts = {"limit_mib": 10_000, "peak_mib": 11_000}
    assert _one(WANT, replace(SHARE, gpu_memory_mib=10_000)) is None
    assert _one(WANT, over) == Warn("a", Reason.of(ReasonCode.OVER_GPU_MEMORY, device="1", **facts))
    warned = replace(over, over_gpu_memory_since_ms=1_000)
    assert _one(WANT, warned, now_ms=3_999) is None
    end = Reason.of(ReasonCode.GPU_MEMORY_EXCEEDED, **facts)
    assert _one(WANT, warned, now_ms=4_000) == Stop("a", Status.FAILED, end, 3_000)


def test_far_over_its_share_of_gpu_memory_it_is_stopped_at_once():
    action = _one(WANT, replace(SHARE, gpu_memory_mib=12_501))
    assert isinstance(action, Stop)
    assert (action.reason.code, action.grace_ms) == (ReasonCode.GPU_MEMORY_EXCEEDED, 0)


def test_an_unused_gpu_is_told_after_the_nodes_time_and_once():
    idle, told = replace(RUNS, gpu_idle_since_ms=1_000), Settings(node="n1", gpu_idle_warning_ms=10_000)
    warning = Warn("a", Reason.of(ReasonCode.GPU_IDLE, idle_ms=10_000, what_follows=""))
    assert reconcile([WANT], [idle], 10_999, RENEWED, told) == ()
    assert reconcile([WANT], [idle], 11_000, RENEWED, told) == (warning,)
    assert reconcile([WANT], [replace(idle, gpu_idle_warned=True)], 99_000, RENEWED, told) == ()
    assert reconcile([WANT], [idle], 99_000, RENEWED, NODE) == ()


def test_an_unused_gpu_ends_a_task_that_says_so_after_a_warning_halfway():
    idle = replace(RUNS, gpu_idle_since_ms=0, gpu_idle_stop_ms=60_000)
    assert _one(WANT, idle, now_ms=29_999) is None
    assert _one(WANT, idle, now_ms=30_000) == Warn(
        "a", Reason.of(ReasonCode.GPU_IDLE, idle_ms=30_000, what_follows="; it is stopped at 1m of that")
    )
    end = Reason.of(ReasonCode.GPU_IDLE_STOPPED, idle_ms=60_000, limit_ms=60_000)
    assert _one(WANT, replace(idle, gpu_idle_warned=True), now_ms=60_000) == Stop("a", Status.FAILED, end, 10_000)


def test_a_card_that_fails_takes_its_task_along_as_lost():
    fault = Reason.of(ReasonCode.GPU_FAULT, device="0", node="n1", why="it is lost")
    assert _one(WANT, replace(RUNS, gpu_fault=fault)) == Stop("a", Status.LOST, fault, 10_000)


def test_a_failure_on_a_card_that_failed_is_put_down_to_the_card_and_a_success_is_not():
    fault = Reason.of(ReasonCode.GPU_FAULT, device="0", node="n1", why="it is lost")
    assert outcome(Exit(code=7), None, {}, "n1", fault) == (Status.LOST, fault)
    assert outcome(Exit(signal=11), None, {}, "n1", fault) == (Status.LOST, fault)
    assert outcome(Exit(code=0), None, {}, "n1", fault)[0] is Status.SUCCEEDED
