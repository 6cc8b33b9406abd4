"""Whatever is measured and whenever: inside the bounds, calm inside a cooldown, and steady under a steady load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from crater_core.lifecycle.autoscale import AutoscaleRule, AutoscaleState, Sample, decide


@st.composite
def rules(draw: st.DrawFn) -> AutoscaleRule:
    low = draw(st.integers(1, 20))
    down = draw(st.integers(0, 150))
    return AutoscaleRule(
        replicas_min=low,
        replicas_max=draw(st.integers(low, 60)),
        up_above_percent=draw(st.integers(down + 1, 200)),
        down_below_percent=down,
        up_for_ms=draw(st.integers(0, 300_000)),
        down_for_ms=draw(st.integers(0, 300_000)),
        cooldown_ms=draw(st.integers(0, 600_000)),
    )


percents = st.none() | st.floats(0, 1000) | st.sampled_from([29.9, 30.0, 70.0, 70.1])
steps_ms = st.integers(-3_600_000, 400_000)


@given(rules(), st.lists(st.tuples(steps_ms, percents, st.integers(0, 70), st.none() | st.integers(0, 70)), max_size=60))
def test_every_change_is_inside_the_bounds_and_outside_the_cooldown(rule: AutoscaleRule, seen: list[tuple]):
    state, wanted, now_ms, true_ms, changed_at_ms = AutoscaleState(), rule.replicas_min, 10_000_000, 0, None
    for step_ms, percent, ready, by_hand in seen:
        now_ms += step_ms
        # A clock that jumps back lets no time pass for the rule.
        true_ms += max(0, step_ms)
        wanted = wanted if by_hand is None else by_hand
        state, decision = decide(rule, AutoscaleState.from_text(state.to_text()), Sample(ready, wanted, percent), now_ms)
        assert (decision.action == "none") == (decision.replicas_to == wanted)
        assert decision.why
        if decision.action == "none":
            continue
        assert percent is not None
        assert rule.replicas_min <= decision.replicas_to <= rule.replicas_max
        assert changed_at_ms is None or true_ms - changed_at_ms >= rule.cooldown_ms
        wanted, changed_at_ms = decision.replicas_to, true_ms


@given(rules(), st.integers(1, 60), st.floats(0, 20_000), st.integers(1_000, 60_000))
def test_a_constant_load_is_answered_once(rule: AutoscaleRule, start: int, load_percent: float, step_ms: int):
    """Total load stays; each replica carries its part. After it came inside the bounds, it moves at most once."""
    state, wanted, now_ms, moves = AutoscaleState(), min(max(start, rule.replicas_min), rule.replicas_max), 0, []
    for _ in range(120):
        now_ms += step_ms
        state, decision = decide(rule, state, Sample(wanted, wanted, load_percent / wanted), now_ms)
        if decision.action != "none":
            moves.append((wanted, decision.replicas_to))
            wanted = decision.replicas_to
    assert len(moves) <= 1


@given(rules(), st.integers(1, 60), st.integers(201, 1000))
def test_a_busy_service_grows_unless_it_is_at_its_most(rule: AutoscaleRule, start: int, percent: int):
    wanted = min(max(start, rule.replicas_min), rule.replicas_max)
    state, first = decide(rule, AutoscaleState(), Sample(wanted, wanted, percent), 0)
    if first.action == "none":
        _, first = decide(rule, state, Sample(wanted, wanted, percent), min(rule.up_for_ms, rule.gap_max_ms))
    assert first.action == ("none" if wanted == rule.replicas_max else "up")


@given(rules(), st.integers(1, 60), st.integers(0, 600_000), st.floats(201, 1000))
def test_missing_metrics_change_nothing_for_however_long(rule: AutoscaleRule, wanted: int, hole_ms: int, percent: float):
    wanted = min(max(wanted, rule.replicas_min), rule.replicas_max)
    before, _ = decide(rule, AutoscaleState(), Sample(wanted, wanted, percent), 0)
    after, decision = decide(rule, before, Sample(wanted, wanted, None), hole_ms)
    assert decision.action == "none"
    held = before.seen_at_ms - before.above_since_ms if before.above_since_ms is not None else None
    held_after = after.seen_at_ms - after.above_since_ms if after.above_since_ms is not None else None
    assert held_after == held
