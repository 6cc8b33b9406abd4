"""What holds for `reconcile` whatever the leases and the workloads are, and over whole lives of workloads."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from crater_agent.reconcile import (
    Finish,
    Forget,
    Kill,
    LeaseState,
    Phase,
    Report,
    Seen,
    Start,
    Stop,
    Want,
    reconcile,
)

NAMES = st.sampled_from("abcd")
TIMES = st.integers(0, 100_000)
WANTS = st.builds(
    Want,
    allocation=NAMES,
    token=st.integers(1, 2),
    stop=st.booleans(),
    started=st.booleans(),
    restartable=st.booleans(),
    grace_ms=st.integers(0, 20_000),
)
SEEN = st.builds(
    Seen,
    allocation=NAMES,
    token=st.integers(1, 2),
    phase=st.sampled_from(Phase),
    restartable=st.booleans(),
    grace_ms=st.integers(0, 20_000),
    started_ms=TIMES,
    time_limit_ms=st.none() | st.integers(0, 50_000),
    stop_asked_ms=st.none() | TIMES,
    stop_grace_ms=st.integers(0, 20_000),
    main_gone=st.booleans(),
    lives=st.booleans(),
    memory_bytes=st.integers(0, 200),
    memory_limit_bytes=st.none() | st.just(100),
    over_memory_since_ms=st.none() | TIMES,
    disk_bytes=st.integers(0, 200),
    disk_limit_bytes=st.none() | st.just(100),
)
LEASES = st.builds(LeaseState, silent_ms=st.integers(0, 60_000), heartbeat_timeout_ms=st.integers(1_000, 60_000))


def _unique(things: list[object]) -> list[object]:
    return list({getattr(thing, "allocation"): thing for thing in things}.values())  # noqa: B009


MANY_WANTS = st.none() | st.lists(WANTS, max_size=4).map(_unique)
MANY_SEEN = st.lists(SEEN, max_size=4).map(_unique)


@given(MANY_WANTS, MANY_SEEN, TIMES, LEASES)
def test_at_most_one_action_for_an_allocation(wants, seen, now_ms, lease):
    names = [action.allocation for action in reconcile(wants, seen, now_ms, lease)]
    assert len(names) == len(set(names))


@given(MANY_WANTS, MANY_SEEN, TIMES, LEASES)
def test_nothing_known_or_started_or_stopped_or_overdue_is_ever_started(wants, seen, now_ms, lease):
    known = {workload.allocation for workload in seen}
    by_name = {want.allocation: want for want in wants or ()}
    for action in reconcile(wants, seen, now_ms, lease):
        if isinstance(action, Start):
            want = by_name[action.allocation]
            assert action.allocation not in known
            assert not want.started
            assert not want.stop
            assert lease.silent_ms < lease.kill_at_ms


@given(MANY_WANTS, MANY_SEEN, TIMES, LEASES)
def test_only_what_is_there_is_acted_on_and_only_what_is_not_is_reported(wants, seen, now_ms, lease):
    known = {workload.allocation for workload in seen}
    for action in reconcile(wants, seen, now_ms, lease):
        if isinstance(action, Start | Report):
            assert action.allocation not in known
        else:
            assert action.allocation in known


@given(MANY_WANTS, MANY_SEEN, TIMES, LEASES)
def test_an_end_is_told_only_when_nothing_lives(wants, seen, now_ms, lease):
    by_name = {workload.allocation: workload for workload in seen}
    for action in reconcile(wants, seen, now_ms, lease):
        if isinstance(action, Finish):
            assert by_name[action.allocation].main_gone
            assert not by_name[action.allocation].lives
        if isinstance(action, Forget):
            assert by_name[action.allocation].phase is Phase.REPORTED


@given(MANY_WANTS, MANY_SEEN, TIMES, LEASES)
def test_at_the_end_of_the_lease_nothing_that_may_be_started_elsewhere_is_left_in_peace(wants, seen, now_ms, lease):
    late = replace(lease, silent_ms=lease.heartbeat_timeout_ms)
    wanted = {want.allocation: want for want in wants or ()}
    acted = {action.allocation for action in reconcile(wants, seen, now_ms, late)}
    for workload in seen:
        want = wanted.get(workload.allocation)
        restartable = workload.restartable and (want is None or want.restartable)
        if workload.phase in (Phase.RUNNING, Phase.STOPPING) and restartable:
            assert workload.allocation in acted


@given(MANY_WANTS, MANY_SEEN, TIMES, LEASES)
def test_the_order_of_what_goes_in_changes_nothing(wants, seen, now_ms, lease):
    forwards = reconcile(wants, seen, now_ms, lease)
    backwards = reconcile(list(reversed(wants)) if wants is not None else None, list(reversed(seen)), now_ms, lease)
    assert sorted(map(repr, forwards)) == sorted(map(repr, backwards))


@st.composite
def _lives(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Things that happen to one allocation, with the time that passes before each."""
    what = st.sampled_from(["give", "take", "stop", "exit", "leftover", "accept", "silence", "pass"])
    return draw(st.lists(st.tuples(what, st.integers(0, 5_000)), max_size=30))


@given(_lives())
def test_over_a_whole_life_it_starts_once_and_after_all_comes_to_rest(story):
    """Carries the actions out on a model of the edge: one start for each lease, and in the end nothing is left."""
    now_ms, silent_ms = 0, 0
    want: Want | None = None
    seen: Seen | None = None
    given_once, starts = False, 0
    finale = [("take", 0), ("accept", 0), *[("pass", 30_000), ("exit", 0), ("accept", 0)] * 4]
    for what, wait_ms in [*story, *finale]:
        now_ms += wait_ms
        silent_ms = silent_ms + wait_ms if what == "silence" else 0
        if what == "give" and not given_once:
            want, given_once = Want("a", 1, grace_ms=1_000), True
        elif what == "take":
            want = None
        elif what == "stop" and want is not None:
            want = replace(want, stop=True)
        elif what == "exit" and seen is not None and seen.phase in (Phase.RUNNING, Phase.STOPPING):
            seen = replace(seen, main_gone=True, lives=False)
        elif what == "leftover" and seen is not None and seen.phase is Phase.RUNNING:
            seen = replace(seen, main_gone=True, lives=True)
        elif what == "accept" and seen is not None and seen.phase is Phase.ENDED:
            seen, want = replace(seen, phase=Phase.REPORTED), None
        for _ in range(3):
            for action in reconcile([want] if want else [], [seen] if seen else [], now_ms, LeaseState(silent_ms)):
                match action:
                    case Start():
                        starts += 1
                        seen = Seen("a", 1, grace_ms=1_000, started_ms=now_ms)
                        want = replace(want, started=True) if want else None
                    case Stop():
                        assert seen is not None
                        seen = replace(seen, phase=Phase.STOPPING, stop_asked_ms=now_ms, stop_grace_ms=action.grace_ms)
                    case Kill():
                        assert seen is not None
                        seen = replace(seen, main_gone=True, lives=False)
                    case Finish():
                        assert seen is not None
                        seen = replace(seen, phase=Phase.ENDED)
                    case Report():
                        seen = Seen("a", 1, phase=Phase.ENDED, lives=False)
                    case Forget():
                        seen = None
                    case _:
                        raise AssertionError(action)
    assert starts <= 1
    assert seen is None
