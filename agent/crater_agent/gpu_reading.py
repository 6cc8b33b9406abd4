"""What NVML says of one GPU at one moment. Values only: `nvml` fills them, everybody else reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds memory of a device."""

    pid: int
    memory_mib: int | None
    """None where the driver does not say."""
    computes: bool = True
    """False: it only draws, as a desktop does."""


def _no_use() -> Mapping[int, int]:
    return {}


@dataclass(frozen=True, slots=True)
class Glance:
    """The little that is looked at often, while something runs on the device. None where the card does not say."""

    uuid: str
    use_percent: int | None = None
    memory_used_mib: int | None = None
    holders: tuple[Holder, ...] | None = None
    error: str = ""
    """Why nothing could be read: it is lost, or the driver refuses."""


@dataclass(frozen=True, slots=True)
class Reading:
    """All of it. Counters are cumulative since the driver was loaded or the card was reset; None where the card does not say."""

    glance: Glance
    temperature_celsius: int | None = None
    power_milliwatt: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    pcie_sent_kib_per_s: int | None = None
    pcie_received_kib_per_s: int | None = None
    nvlink_sent_kib: int | None = None
    nvlink_received_kib: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    retirement_pending: bool | None = None
    remapped_rows: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle_mask: int | None = None
    recovery: int | None = None
    """What the driver itself asks for: 0 nothing, 1 a reset, 2 a reboot, others as NVML lists them."""
    use_percent_max: int | None = None
    """The most of all looks since the last reading."""
    process_use: Mapping[int, int] | None = field(default_factory=_no_use)
    """Percent of the device by pid, since the last reading; None where it cannot be told."""

    @property
    def uuid(self) -> str:
        return self.glance.uuid


@dataclass(frozen=True, slots=True)
class XidEvent:
    """The driver's word on something that went wrong. `uuid` is the card's, also for what happened on a slice."""

    uuid: str
    number: int
