"""Whether a device may be given out: faults and time in, the next state out. Pure; times are milliseconds of one clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from crater_agent.gpu_faults import Fault

AT_ONCE = frozenset({"held", "foreign", "mps"})
"""Once it is over, it is over: nothing is waited for."""
FORGOTTEN_MS = 24 * 3_600_000
TIMES_LONGER_MAX = 64


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Of one device. Without faults it is well."""

    faults: tuple[Fault, ...] = ()
    since_ms: int = 0
    bad_ms: int = 0
    """When a fault that has to be outlived was last seen."""
    times: int = 0
    """How often it was set aside for such a fault lately: each time it has to be well for longer before it is given out."""

    @property
    def why(self) -> str:
        return "; ".join(fault.text for fault in self.faults)

    @property
    def stops(self) -> bool:
        return any(fault.stops for fault in self.faults)


def looked_at(was: Quarantine, seen: Iterable[Fault], now_ms: int, well_for_ms: int) -> Quarantine:
    """After a look: `seen` is what is wrong now. A fault that is gone counts until the device has been well for `well_for_ms`,
    doubled for each time that it came back; what the device holds or serves is over at once."""
    now = {fault.code: fault for fault in seen}
    lasting = [fault for fault in now.values() if fault.code not in AT_ONCE]
    bad_ms = now_ms if lasting else was.bad_ms
    over = not lasting and now_ms - bad_ms >= well_for_ms * min(TIMES_LONGER_MAX, 2 ** max(0, was.times - 1))
    if not over:
        now |= {fault.code: fault for fault in was.faults if fault.code not in AT_ONCE and fault.code not in now}
    outlived = {fault.code for fault in was.faults} - AT_ONCE
    times = was.times
    if now_ms - was.bad_ms > FORGOTTEN_MS:
        times = 0
    if set(now) - AT_ONCE and not outlived:
        times += 1
    faults = tuple(now[code] for code in sorted(now))
    return Quarantine(faults, (was.since_ms if was.faults else now_ms) if faults else 0, bad_ms, times)


def struck(was: Quarantine, fault: Fault, now_ms: int) -> Quarantine:
    """The driver has told of a fault that no reading shows."""
    return looked_at(was, (*was.faults, fault), now_ms, well_for_ms=1)
