"""When a service gets more or fewer replicas: a rule, what it remembers, one sample in, one decision out. Pure.

How many replicas a load wants depends on the load alone, so that a constant load never swings between two numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

from crater_core.errors import BadConfiguration, InvalidRequest
from crater_core.model.units import show_duration

Action = Literal["none", "up", "down"]
REPLICAS_MAX = 1000
DURATION_MS_MAX = 7 * 86_400_000
_TINY = 1e-6


@dataclass(frozen=True, slots=True)
class AutoscaleRule:
    """Percentages are of the cores that the ready replicas asked for. Samples further apart than `gap_max_ms` do not prove
    what was between them: both windows then begin again. Raises BadConfiguration with the field at fault."""

    replicas_min: int = 2
    replicas_max: int = 10
    up_above_percent: float = 70
    up_for_ms: int = 120_000
    down_below_percent: float = 30
    down_for_ms: int = 300_000
    cooldown_ms: int = 180_000
    gap_max_ms: int = 300_000

    def __post_init__(self) -> None:
        _check(1 <= self.replicas_min <= REPLICAS_MAX, "replicas_min", self.replicas_min, f"1 to {REPLICAS_MAX}")
        _check(
            self.replicas_min <= self.replicas_max <= REPLICAS_MAX,
            "replicas_max",
            self.replicas_max,
            f"replicas_min ({self.replicas_min}) to {REPLICAS_MAX}",
        )
        _check(0 < self.up_above_percent <= 10_000, "up_above_percent", self.up_above_percent, "above 0")
        _check(
            0 <= self.down_below_percent < self.up_above_percent,
            "down_below_percent",
            self.down_below_percent,
            f"0 or more and below up_above_percent ({self.up_above_percent:g})",
        )
        for name in ("up_for_ms", "down_for_ms", "cooldown_ms"):
            _check(0 <= getattr(self, name) <= DURATION_MS_MAX, name, getattr(self, name), "0 to 7 days, in milliseconds")
        _check(0 < self.gap_max_ms <= DURATION_MS_MAX, "gap_max_ms", self.gap_max_ms, "more than 0, in milliseconds")


def _check(right: bool, field: str, found: float, expected: str) -> None:
    if not right:
        raise BadConfiguration(f"{field} must be {expected}, found {found:g}", field=field, found=found, expected=expected)


@dataclass(frozen=True, slots=True)
class AutoscaleState:
    """What the rule remembers of one service; `to_text` and `from_text` keep it in a sensor's cursor."""

    seen_at_ms: int | None = None
    wanted: int | None = None
    """Replicas that were asked for when it last looked, or that it asked for itself."""
    above_since_ms: int | None = None
    below_since_ms: int | None = None
    changed_at_ms: int | None = None
    """When the replicas last changed, by this rule or by hand."""

    def to_text(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None}, sort_keys=True)

    @staticmethod
    def from_text(text: str | None) -> AutoscaleState:
        """Nothing gives a fresh state. Raises InvalidRequest when the text is something else's."""
        known = {field.name for field in fields(AutoscaleState)}
        try:
            read: Any = json.loads(text) if text else {}
            kept = {name: value for name, value in cast(dict[str, Any], read).items() if name in known}
            if not all(isinstance(value, int) and not isinstance(value, bool) for value in kept.values()):
                raise ValueError("a value is no whole number")
        except (ValueError, AttributeError) as error:
            raise InvalidRequest(
                f"the saved state of an autoscaling rule cannot be read: {error}", found=str(text)[:200]
            ) from None
        return AutoscaleState(**kept)


@dataclass(frozen=True, slots=True)
class Sample:
    """How a service is now. `cpu_percent`: mean over its ready replicas, None when there is no measurement."""

    ready: int
    wanted: int
    cpu_percent: float | None


@dataclass(frozen=True, slots=True)
class Decision:
    action: Action
    replicas_from: int
    replicas_to: int
    why: str


def decide(rule: AutoscaleRule, state: AutoscaleState, sample: Sample, now_ms: int) -> tuple[AutoscaleState, Decision]:
    """The state to keep for the next sample, and what to do. The caller scales, then keeps the state; when scaling fails it
    keeps the old one. A clock that jumped back moves the remembered times with it, so that no window or cooldown changes."""
    percent = sample.cpu_percent
    if percent is None or sample.ready < 1 or not math.isfinite(percent) or percent < 0:
        return _not_measured(_on_this_clock(state, now_ms), now_ms), _hold(sample, "There is no CPU sample of a ready replica.")
    state = _on_this_clock(state, now_ms)
    if state.seen_at_ms is not None and now_ms - state.seen_at_ms > rule.gap_max_ms:
        state = replace(state, above_since_ms=None, below_since_ms=None)
    if state.wanted is not None and state.wanted != sample.wanted:
        state = replace(state, above_since_ms=None, below_since_ms=None, changed_at_ms=now_ms)
    state = replace(
        state,
        seen_at_ms=now_ms,
        wanted=sample.wanted,
        above_since_ms=_since(state.above_since_ms, percent > rule.up_above_percent, now_ms),
        below_since_ms=_since(state.below_since_ms, percent < rule.down_below_percent, now_ms),
    )
    decision = _decided(rule, state, sample, percent, now_ms)
    if decision.action != "none":
        state = AutoscaleState(seen_at_ms=now_ms, wanted=decision.replicas_to, changed_at_ms=now_ms)
    return state, decision


def replicas_for(load_percent: float, rule: AutoscaleRule) -> int:
    """How many replicas a load (percent of one replica, summed) wants: as many as bring each to the middle of the band, or
    one fewer when that many would be idle and one fewer would not be busy."""
    middle = (rule.up_above_percent + rule.down_below_percent) / 2
    count = math.ceil(load_percent / middle - _TINY)
    if count > 1 and load_percent / count < rule.down_below_percent and load_percent / (count - 1) <= rule.up_above_percent:
        count -= 1
    return min(max(count, rule.replicas_min), rule.replicas_max)


def _decided(rule: AutoscaleRule, state: AutoscaleState, sample: Sample, percent: float, now_ms: int) -> Decision:
    target, why = _aim(rule, state, sample, percent, now_ms)
    if target == sample.wanted:
        return _hold(sample, why)
    if state.changed_at_ms is not None and now_ms - state.changed_at_ms < rule.cooldown_ms:
        ago = show_duration(now_ms - state.changed_at_ms)
        return _hold(sample, f"{why} The last change was {ago} ago: waiting until {show_duration(rule.cooldown_ms)} have passed.")
    action: Action = "up" if target > sample.wanted else "down"
    return Decision(action, sample.wanted, target, f"{why} {sample.wanted} → {target} replicas.")


def _aim(rule: AutoscaleRule, state: AutoscaleState, sample: Sample, percent: float, now_ms: int) -> tuple[int, str]:
    """The number to come to when no cooldown holds it, and why."""
    if not rule.replicas_min <= sample.wanted <= rule.replicas_max:
        bounds = f"{rule.replicas_min} to {rule.replicas_max}"
        return min(max(sample.wanted, rule.replicas_min), rule.replicas_max), f"{sample.wanted} is outside of {bounds} replicas."
    target = replicas_for(percent * sample.ready, rule)
    cpu = f"CPU {percent:.0f} %"
    if state.above_since_ms is not None:
        held, what = now_ms - state.above_since_ms, f"above {rule.up_above_percent:g} %"
        if held < rule.up_for_ms:
            return sample.wanted, f"{cpu} is {what} since {show_duration(held)}, not yet {show_duration(rule.up_for_ms)}."
        if sample.wanted == rule.replicas_max:
            return sample.wanted, f"{cpu} is {what}, but {rule.replicas_max} replicas are the most allowed."
        if target <= sample.wanted:
            return sample.wanted, f"{cpu} is {what} with {sample.ready} of {sample.wanted} replicas ready; the others are coming."
        return target, f"{cpu} has been {what} for {show_duration(held)}."
    if state.below_since_ms is not None:
        held, what = now_ms - state.below_since_ms, f"below {rule.down_below_percent:g} %"
        if held < rule.down_for_ms:
            return sample.wanted, f"{cpu} is {what} since {show_duration(held)}, not yet {show_duration(rule.down_for_ms)}."
        if sample.wanted == rule.replicas_min:
            return sample.wanted, f"{cpu} is {what}, but {rule.replicas_min} replicas are the fewest allowed."
        if sample.ready < sample.wanted:
            return sample.wanted, f"{cpu} is {what}, but only {sample.ready} of {sample.wanted} replicas are ready."
        if target >= sample.wanted:
            return sample.wanted, f"{cpu} is {what}, but one replica fewer would be above {rule.up_above_percent:g} %."
        return target, f"{cpu} has been {what} for {show_duration(held)}."
    return sample.wanted, f"{cpu} is between {rule.down_below_percent:g} % and {rule.up_above_percent:g} %."


def _hold(sample: Sample, why: str) -> Decision:
    return Decision("none", sample.wanted, sample.wanted, why)


def _since(since_ms: int | None, holds: bool, now_ms: int) -> int | None:
    if not holds:
        return None
    return now_ms if since_ms is None else since_ms


def _not_measured(state: AutoscaleState, now_ms: int) -> AutoscaleState:
    """A time without measurements counts for neither window and ends neither."""
    passed_ms = now_ms - state.seen_at_ms if state.seen_at_ms is not None else 0
    return replace(
        state,
        seen_at_ms=now_ms,
        above_since_ms=_moved(state.above_since_ms, passed_ms),
        below_since_ms=_moved(state.below_since_ms, passed_ms),
    )


def _on_this_clock(state: AutoscaleState, now_ms: int) -> AutoscaleState:
    if state.seen_at_ms is None or now_ms >= state.seen_at_ms:
        return state
    back_ms = now_ms - state.seen_at_ms
    return replace(
        state,
        seen_at_ms=now_ms,
        above_since_ms=_moved(state.above_since_ms, back_ms),
        below_since_ms=_moved(state.below_since_ms, back_ms),
        changed_at_ms=_moved(state.changed_at_ms, back_ms),
    )


def _moved(at_ms: int | None, by_ms: int) -> int | None:
    return None if at_ms is None else at_ms + by_ms
