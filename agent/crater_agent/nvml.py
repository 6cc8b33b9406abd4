"""The one door to NVML (`pynvml`): which NVIDIA GPUs this machine has, and how they are now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pynvml as _pynvml

from crater_agent.gpu_access import why_closed
from crater_agent.gpu_reading import Glance, Reading, XidEvent
from crater_agent.nvml_card import (
    capability_of,
    glance_at,
    memory_mib_of,
    mig_places_of,
    number_or_none,
    process_use,
    reading_of,
    text_of,
)
from crater_core.model.resources import compute_slices
from crater_core.model.units import MILLI

# The library has no type information.
_nvml = cast(Any, _pynvml)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or MIG slice as NVML describes it. `index` counts in PCI bus order, as CUDA does when told to."""

    uuid: str
    index: int
    name: str
    memory_mib: int
    pci_bus_id: str = ""
    numa_node: int | None = None
    links: tuple[str, ...] = ()
    mig: bool = False
    parent_uuid: str | None = None
    minor: int | None = None
    """The N of the card's /dev/nvidiaN, which need not be `index`."""
    mig_places: tuple[str, ...] = ()
    """Of a slice: where the driver keeps the numbers of its device files."""
    compute_capability: str = ""
    """Such as 8.0."""
    card_milli: int = MILLI
    """How much of its card it is, by compute slices."""

    @property
    def card(self) -> str:
        """The UUID of the card that it is, or that it is a slice of."""
        return self.parent_uuid or self.uuid


@dataclass(frozen=True, slots=True)
class Discovery:
    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    cuda_version: str = ""
    """The newest that the driver can run, such as 12.8."""
    note: str = ""
    """Why there are none, or what is odd; for people."""


class Nvml:
    """Holds NVML open. Every call may fail for one device and still answer for the others, and may hang: it is for threads of
    its own, one for each card. The library is shut and opened anew only while no thread is inside it."""

    def __init__(self) -> None:
        self._open = False
        self._inside = 0
        self._closing = False
        self._gate = threading.Condition()
        self.openings = 0
        """How often it has been opened: event sets and what is known of lost cards end with an opening."""

    def discover(self) -> Discovery:
        with self._gate:
            note = self._start()
            if note:
                return Discovery(note=note)
            driver = text_of(_nvml.nvmlSystemGetDriverVersion())
            cuda = number_or_none(_nvml.nvmlSystemGetCudaDriverVersion_v2)
            found: list[Gpu] = []
            notes: list[str] = []
            handles = self._handles(notes)
            for index, handle in enumerate(handles):
                try:
                    found += self._describe(handle, index, handles)
                except _nvml.NVMLError as error:
                    notes.append(f"GPU {index}: {_trouble(error)}")
            if not found and not notes:
                notes.append(f"the NVIDIA driver {driver} is there, but shows no GPU")
            return Discovery(tuple(found), driver, _version(cuda) if cuda else "", "; ".join(notes))

    def glance(self, uuid: str) -> Glance:
        with self._in():
            return glance_at(uuid)

    def read(self, gpu: Gpu, since_us: int) -> tuple[Reading, int]:
        """All of one device, and the time stamp of its newest sample of use by process: hand it in the next time."""
        with self._in():
            glance = glance_at(gpu.uuid)
            if glance.error:
                return Reading(glance, process_use=None), since_us
            try:
                card = _nvml.nvmlDeviceGetHandleByUUID(gpu.card)
            except _nvml.NVMLError as error:
                return Reading(Glance(gpu.uuid, error=str(error)), process_use=None), since_us
            use, newest_us = process_use(card, since_us) if not gpu.mig else (None, since_us)
            return reading_of(glance, card, use), newest_us

    def events_of(self, card: str, timeout_ms: int) -> Iterator[XidEvent | None]:
        """What happens to a card, until the library is opened anew or the card is lost. None each `timeout_ms` without news."""
        opening = self.openings
        with self._in():
            events = _nvml.nvmlEventSetCreate()
        try:
            with self._in():
                handle = _nvml.nvmlDeviceGetHandleByUUID(card)
                _nvml.nvmlDeviceRegisterEvents(handle, _nvml.nvmlEventTypeXidCriticalError, events)
            while opening == self.openings:
                found = None
                with self._in(), contextlib.suppress(_nvml.NVMLError_Timeout):
                    event = _nvml.nvmlEventSetWait_v2(events, timeout_ms)
                    found = XidEvent(card, int(event.eventData))
                yield found
        except _nvml.NVMLError:
            return
        finally:
            if opening == self.openings:
                with self._in(), contextlib.suppress(_nvml.NVMLError):
                    _nvml.nvmlEventSetFree(events)

    def reopen(self, patience_s: float = 3.0) -> bool:
        """A card that was lost is seen again only so. False when a call that hangs was in the way."""
        with self._gate:
            self._closing = True
            try:
                if not self._gate.wait_for(lambda: not self._inside, patience_s):
                    return False
                if self._open:
                    with contextlib.suppress(_nvml.NVMLError):
                        _nvml.nvmlShutdown()
                self._open = False
                return not self._start()
            finally:
                self._closing = False
                self._gate.notify_all()

    def close(self) -> None:
        with self._gate:
            if self._open and not self._inside:
                with contextlib.suppress(_nvml.NVMLError):
                    _nvml.nvmlShutdown()
                self._open = False

    @contextlib.contextmanager
    def _in(self) -> Generator[None]:
        with self._gate:
            self._gate.wait_for(lambda: not self._closing)
            self._inside += 1
        try:
            yield
        finally:
            with self._gate:
                self._inside -= 1
                self._gate.notify_all()

    def _start(self) -> str:
        if self._open:
            return ""
        try:
            _nvml.nvmlInit()
        except _nvml.NVMLError as error:
            return _why_none(error)
        self._open = True
        self.openings += 1
        return ""

    def _handles(self, notes: list[str]) -> list[Any]:
        """In PCI bus order."""
        handles: list[tuple[str, Any]] = []
        for number in range(int(_nvml.nvmlDeviceGetCount())):
            try:
                handle = _nvml.nvmlDeviceGetHandleByIndex(number)
                handles.append((text_of(_nvml.nvmlDeviceGetPciInfo(handle).busId).lower(), handle))
            except _nvml.NVMLError as error:
                notes.append(f"GPU {number}: {_trouble(error)}")
        return [handle for _, handle in sorted(handles, key=lambda pair: pair[0])]

    def _describe(self, handle: Any, index: int, handles: list[Any]) -> Iterator[Gpu]:
        uuid, name = text_of(_nvml.nvmlDeviceGetUUID(handle)), text_of(_nvml.nvmlDeviceGetName(handle))
        slices, most = self._mig_slices(handle)
        numa_node = _numa_node(text_of(_nvml.nvmlDeviceGetPciInfo(handle).busId))
        minor = number_or_none(lambda: _nvml.nvmlDeviceGetMinorNumber(handle))
        capability = capability_of(handle)
        if not slices:
            memory_mib = memory_mib_of(handle)
            bus_id = text_of(_nvml.nvmlDeviceGetPciInfo(handle).busId)
            links = self._links(handle, handles)
            yield Gpu(uuid, index, name, memory_mib, bus_id, numa_node, links, minor=minor, compute_capability=capability)
        for slice_handle in slices:
            memory_mib = memory_mib_of(slice_handle)
            slice_uuid, slice_name = (
                text_of(_nvml.nvmlDeviceGetUUID(slice_handle)),
                text_of(_nvml.nvmlDeviceGetName(slice_handle)),
            )
            places = mig_places_of(minor, slice_handle)
            part = card_milli(slice_name, most)
            yield Gpu(slice_uuid, index, slice_name, memory_mib, "", numa_node, (), True, uuid, minor, places, capability, part)

    def _mig_slices(self, handle: Any) -> tuple[list[Any], int]:
        """Those that are there, and how many compute slices the card has."""
        try:
            if int(_nvml.nvmlDeviceGetMigMode(handle)[0]) != _nvml.NVML_DEVICE_MIG_ENABLE:
                return [], 0
            count = int(_nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        except _nvml.NVMLError:
            return [], 0
        found: list[Any] = []
        for number in range(count):
            with contextlib.suppress(_nvml.NVMLError):
                found.append(_nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        return found, count

    def _links(self, handle: Any, handles: list[Any]) -> tuple[str, ...]:
        """UUIDs of the GPUs that NVLink joins to this one."""
        peers: list[str] = []
        for other in handles:
            if other is handle:
                continue
            with contextlib.suppress(_nvml.NVMLError):
                status = _nvml.nvmlDeviceGetP2PStatus(handle, other, _nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                if status == _nvml.NVML_P2P_STATUS_OK:
                    peers.append(text_of(_nvml.nvmlDeviceGetUUID(other)))
        return tuple(peers)


def card_milli(model: str, slices: int) -> int:
    """How much of its card a MIG slice is, of `slices` on the card; rounded down, so that all together are no more than one."""
    mine = compute_slices(model.lower())
    return min(MILLI, mine * MILLI // slices) if mine and slices else MILLI


def _version(cuda: int) -> str:
    """12080 as 12.8."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _numa_node(bus_id: str) -> int | None:
    """From the kernel; NVML writes the PCI domain with eight digits, the kernel with four."""
    domain, _, rest = bus_id.lower().partition(":")
    try:
        node = int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _why_none(error: Any) -> str:
    nodes = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if isinstance(error, _nvml.NVMLError_LibraryNotFound):
        if nodes:
            return f"{nodes[0]} exists, but libnvidia-ml.so.1 was not found: install the driver's user-space libraries"
        return "no NVIDIA driver on this machine (libnvidia-ml.so.1 was not found): no real GPU to offer"
    if isinstance(error, _nvml.NVMLError_DriverNotLoaded):
        return why_closed() or "the NVIDIA kernel driver is not loaded: `modprobe nvidia`, or reboot after installing it"
    if isinstance(error, _nvml.NVMLError_NoPermission):
        return _no_permission()
    return f"NVML could not be started: {error}"


def _trouble(error: Any) -> str:
    return _no_permission() if isinstance(error, _nvml.NVMLError_NoPermission) else str(error)


def _no_permission() -> str:
    why = why_closed() or "add the agent's user to the groups video and render"
    return f"no permission on the NVIDIA device files: {why}"
