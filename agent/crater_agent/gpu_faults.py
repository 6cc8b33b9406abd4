"""What is wrong with a GPU: the driver's Xid numbers sorted by whose fault they are, and the faults a reading shows. Pure.

The numbers are those of NVIDIA's "Xid Errors" document; what it calls for ("reset", "restart the application") decides the class.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from crater_agent.gpu_reading import Reading


class Whose(StrEnum):
    PROGRAM = "program"
    """A program did something wrong: the card is well."""
    CARD = "card"
    """What runs on it cannot be trusted any more."""
    CARD_LATER = "card_later"
    """The card wants attention: nothing new, while what runs may go on."""


_PROGRAMS = {
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup after an earlier error",
    68: "video processor exception",
    69: "graphics engine class error",
}
_CARDS = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    61: "internal micro-controller breakpoint",
    62: "internal micro-controller halt",
    64: "failure to retire a page or remap a row",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
}
_LATER = {
    32: "corrupted push buffer stream",
    38: "driver firmware error",
    63: "a page was retired or a row is to be remapped",
    92: "many corrected ECC errors",
    94: "contained ECC error",
}


def whose(xid: int) -> Whose:
    """A number that is not known here is taken for the card's, and ends nothing."""
    return Whose.PROGRAM if xid in _PROGRAMS else Whose.CARD if xid in _CARDS else Whose.CARD_LATER


def xid_text(xid: int) -> str:
    text = _PROGRAMS.get(xid) or _CARDS.get(xid) or _LATER.get(xid)
    return f"Xid {xid} ({text})" if text else f"Xid {xid}"


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that keeps a device from being given out. `text` goes on with the device's name: "GPU 0: ..."."""

    code: str
    text: str
    stops: bool = False
    """What runs on the device cannot be trusted any more."""


def of_xid(xid: int) -> Fault | None:
    """None for what a program has done."""
    kind = whose(xid)
    return None if kind is Whose.PROGRAM else Fault(f"xid_{xid}", f"the driver reported {xid_text(xid)}", kind is Whose.CARD)


_RECOVERY = {1: "a reset", 2: "a reboot", 3: "peer-to-peer traffic to end", 4: "a reset once nothing runs on it"}


def of_reading(reading: Reading, ignored: Collection[str] = ()) -> tuple[Fault, ...]:
    """What the reading shows now; `ignored` names codes that the operator wants no quarantine for."""
    return tuple(fault for fault in _seen(reading) if fault.code not in ignored)


def _seen(reading: Reading) -> Iterator[Fault]:
    if reading.glance.error:
        yield Fault("lost", f"NVML cannot read it: {reading.glance.error}", stops=True)
        return
    if reading.ecc_uncorrected:
        text = (
            f"{reading.ecc_uncorrected} uncorrectable ECC error(s) since its last reset: `nvidia-smi --gpu-reset` when it is free"
        )
        yield Fault("ecc", text)
    if reading.remap_failed:
        yield Fault("remap_failed", "a row of its memory could not be remapped: it has to be replaced")
    elif reading.remap_pending:
        yield Fault("remap_pending", "rows of its memory wait to be remapped: `nvidia-smi --gpu-reset` when it is free")
    if reading.retirement_pending:
        yield Fault("retirement_pending", "pages of its memory wait to be retired: `nvidia-smi --gpu-reset` when it is free")
    if reading.recovery:
        yield Fault("recovery", f"the driver asks for {_RECOVERY.get(reading.recovery, f'recovery action {reading.recovery}')}")


_THROTTLE = {
    0x04: "power_cap",
    0x08: "hardware",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
    0x200: "board_limit",
    0x400: "reliability",
}
UNWELCOME = frozenset({"hardware", "hardware_thermal", "power_brake"})
"""Throttling that says that cooling or power is amiss; a power cap is everyday."""


def throttling(mask: int | None) -> frozenset[str]:
    """Why its clocks are held down, in words; an idle card and clocks that somebody has set are no throttling."""
    return frozenset(name for bit, name in _THROTTLE.items() if (mask or 0) & bit)


THROTTLE_NAMES = tuple(_THROTTLE.values())
