"""The autoscaling rule: up when busy for long enough, down when idle for long enough, and nothing on thin evidence."""

from __future__ import annotations

import pytest

from crater_core.errors import BadConfiguration, InvalidRequest
from crater_core.lifecycle.autoscale import AutoscaleRule, AutoscaleState, Decision, Sample, decide, replicas_for

RULE = AutoscaleRule()
MINUTE = 60_000


def story(*samples: tuple[float, Sample], rule: AutoscaleRule = RULE) -> list[Decision]:
    """Decisions for samples given as (minute, sample)."""
    state, decisions = AutoscaleState(), []
    for minute, sample in samples:
        state, decision = decide(rule, AutoscaleState.from_text(state.to_text()), sample, round(minute * MINUTE))
        decisions.append(decision)
    return decisions


def a_service(percent: float | None, wanted: int = 2, ready: int | None = None) -> Sample:
    return Sample(wanted if ready is None else ready, wanted, percent)


def test_busy_for_two_minutes_brings_the_replicas_to_the_middle_of_the_band():
    first, second, third = story((0, a_service(90)), (1, a_service(90)), (2, a_service(90)))
    assert (first.action, second.action) == ("none", "none")
    assert third == Decision("up", 2, 4, "CPU 90 % has been above 70 % for 2m. 2 → 4 replicas.")


def test_one_quiet_sample_starts_the_two_minutes_again():
    decisions = story((0, a_service(90)), (1, a_service(60)), (2, a_service(90)), (3.9, a_service(90)))
    assert [decision.action for decision in decisions] == ["none"] * 4
    assert decisions[-1].why == "CPU 90 % is above 70 % since 1m 54s, not yet 2m."


def test_idle_for_five_minutes_takes_replicas_away_down_to_the_minimum():
    last = story(*((minute, a_service(10, wanted=8)) for minute in range(6)))[-1]
    assert (last.action, last.replicas_from, last.replicas_to) == ("down", 8, 2)


def test_nothing_changes_inside_the_cooldown():
    decisions = story(
        (0, a_service(95)), (2, a_service(95)), (2.5, a_service(95, 4)), (4.6, a_service(95, 4)), (5, a_service(95, 4))
    )
    assert [decision.action for decision in decisions] == ["none", "up", "none", "none", "up"]
    assert "The last change was 2m 36s ago: waiting until 3m have passed." in decisions[3].why


def test_missing_metrics_neither_count_nor_start_the_window_again():
    decisions = story((0, a_service(90)), (1, a_service(90)), (2, a_service(None)), (3, a_service(90)), (4, a_service(90)))
    assert [decision.action for decision in decisions] == ["none", "none", "none", "up", "none"]
    # One minute before the gap and one after it make the two; the minute that ended without a sample does not count.
    frozen = story((0, a_service(90)), (1, a_service(None)), (2, a_service(None)), (3, a_service(90)))
    assert [decision.action for decision in frozen] == ["none"] * 4


def test_a_service_without_a_ready_replica_is_left_alone():
    assert story((0, a_service(None, 2, 0)), (9, a_service(0.0, 2, 0)))[-1].why == "There is no CPU sample of a ready replica."


def test_a_clock_that_jumps_back_changes_no_window_and_no_cooldown():
    decisions = story((100, a_service(90)), (101, a_service(90)), (40, a_service(90)), (41, a_service(90)))
    assert [decision.action for decision in decisions] == ["none", "none", "none", "up"]
    after = story(
        (100, a_service(90)), (102, a_service(90)), (50, a_service(90, 4)), (52, a_service(90, 4)), (53, a_service(90, 4))
    )
    assert [decision.action for decision in after] == ["none", "up", "none", "none", "up"]


def test_a_rule_that_did_not_look_for_hours_begins_again():
    assert story((0, a_service(90)), (180, a_service(90)))[-1].action == "none"


def test_replicas_that_are_still_starting_are_not_asked_for_twice():
    last = story((0, a_service(90, 4, 2)), (2, a_service(90, 4, 2)))[-1]
    assert last.why == "CPU 90 % is above 70 % with 2 of 4 replicas ready; the others are coming."


def test_a_service_with_missing_replicas_does_not_shrink():
    last = story(*((minute, a_service(5, 6, 3)) for minute in range(6)))[-1]
    assert (last.action, last.why) == ("none", "CPU 5 % is below 30 %, but only 3 of 6 replicas are ready.")


def test_scaling_by_hand_starts_the_cooldown():
    decisions = story((0, a_service(90)), (2, a_service(90, 3)), (4.9, a_service(90, 3)), (5, a_service(90, 3)))
    assert [decision.action for decision in decisions] == ["none", "none", "none", "up"]


def test_replicas_outside_the_bounds_are_brought_inside():
    assert story((0, a_service(50, 1)))[0] == Decision("up", 1, 2, "1 is outside of 2 to 10 replicas. 1 → 2 replicas.")
    assert story((0, a_service(50, 12)))[0].replicas_to == 10


def test_at_the_most_allowed_it_says_so():
    last = story((0, a_service(99, 10)), (2, a_service(99, 10)))[-1]
    assert (last.action, last.why) == ("none", "CPU 99 % is above 70 %, but 10 replicas are the most allowed.")


def test_a_narrow_band_that_no_number_of_replicas_meets_stays_where_it_is():
    rule = AutoscaleRule(replicas_min=1, up_above_percent=70, down_below_percent=60)
    assert replicas_for(71, rule) == 2
    last = story(*((minute, a_service(35.5, 2)) for minute in range(6)), rule=rule)[-1]
    assert (last.action, last.why) == ("none", "CPU 36 % is below 60 %, but one replica fewer would be above 70 %.")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("replicas_min", 0),
        ("replicas_max", 1),
        ("replicas_max", 1001),
        ("up_above_percent", 0),
        ("down_below_percent", 70),
        ("down_below_percent", -1),
        ("up_for_ms", -1),
        ("cooldown_ms", 8 * 86_400_000),
        ("gap_max_ms", 0),
        ("up_above_percent", float("nan")),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_by_field(field: str, value: float):
    with pytest.raises(BadConfiguration) as refused:
        AutoscaleRule(**{field: value})
    assert refused.value.fields["field"] == field
    assert str(refused.value).startswith(f"{field} must be ")


def test_a_saved_state_comes_back_and_a_foreign_one_is_refused():
    state = AutoscaleState(seen_at_ms=5, wanted=2, above_since_ms=1)
    assert AutoscaleState.from_text(state.to_text()) == state
    assert AutoscaleState.from_text(None) == AutoscaleState.from_text("") == AutoscaleState()
    assert AutoscaleState.from_text('{"wanted": 3, "of_a_later_version": "x"}') == AutoscaleState(wanted=3)
    for foreign in ("nonsense", "[1]", '"text"', '{"wanted": "3"}', '{"wanted": true}'):
        with pytest.raises(InvalidRequest):
            AutoscaleState.from_text(foreign)
