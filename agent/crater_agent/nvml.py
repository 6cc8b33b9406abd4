"""The one door to NVML (`pynvml`): which NVIDIA GPUs this machine has, and how they are now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pynvml as _pynvml

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


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What a GPU does now; None where the card does not say."""

    uuid: str
    use_percent: int | None = None
    memory_used_mib: int | None = None
    temperature_celsius: int | None = None
    power_milliwatt: int | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    note: str = ""
    """Why there are none, or what is odd; for people."""


class Nvml:
    """Holds NVML open. Every call may fail for one device and still answer for the others."""

    def __init__(self) -> None:
        self._open = False
        self._lock = threading.Lock()

    def discover(self) -> Discovery:
        with self._lock:
            note = self._start()
            if note:
                return Discovery(note=note)
            driver = _text(_nvml.nvmlSystemGetDriverVersion())
            found: list[Gpu] = []
            notes: list[str] = []
            handles = self._handles(notes)
            for index, handle in enumerate(handles):
                try:
                    found += self._describe(handle, index, handles)
                except _nvml.NVMLError as error:
                    notes.append(f"GPU {index}: {error}")
            if not found and not notes:
                notes.append(f"the NVIDIA driver {driver} is there, but shows no GPU")
            return Discovery(tuple(found), driver, "; ".join(notes))

    def sample(self, uuids: tuple[str, ...]) -> tuple[GpuSample, ...]:
        with self._lock:
            return tuple(self._sample(uuid) for uuid in uuids) if self._open else ()

    def close(self) -> None:
        with self._lock:
            if self._open:
                with contextlib.suppress(_nvml.NVMLError):
                    _nvml.nvmlShutdown()
                self._open = False

    def _start(self) -> str:
        if self._open:
            return ""
        try:
            _nvml.nvmlInit()
        except _nvml.NVMLError as error:
            return _why_none(error)
        self._open = True
        return ""

    def _handles(self, notes: list[str]) -> list[Any]:
        """In PCI bus order."""
        handles: list[tuple[str, Any]] = []
        for number in range(int(_nvml.nvmlDeviceGetCount())):
            try:
                handle = _nvml.nvmlDeviceGetHandleByIndex(number)
                handles.append((_text(_nvml.nvmlDeviceGetPciInfo(handle).busId).lower(), handle))
            except _nvml.NVMLError as error:
                notes.append(f"GPU {number}: {error}")
        return [handle for _, handle in sorted(handles, key=lambda pair: pair[0])]

    def _describe(self, handle: Any, index: int, handles: list[Any]) -> Iterator[Gpu]:
        uuid, name = _text(_nvml.nvmlDeviceGetUUID(handle)), _text(_nvml.nvmlDeviceGetName(handle))
        slices = list(self._mig_slices(handle))
        numa_node = _numa_node(_text(_nvml.nvmlDeviceGetPciInfo(handle).busId))
        minor = _number(lambda: _nvml.nvmlDeviceGetMinorNumber(handle))
        if not slices:
            memory_mib = int(_nvml.nvmlDeviceGetMemoryInfo(handle).total) // 1024**2
            bus_id = _text(_nvml.nvmlDeviceGetPciInfo(handle).busId)
            yield Gpu(uuid, index, name, memory_mib, bus_id, numa_node, self._links(handle, handles), minor=minor)
        for slice_handle in slices:
            memory_mib = int(_nvml.nvmlDeviceGetMemoryInfo(slice_handle).total) // 1024**2
            slice_uuid, slice_name = _text(_nvml.nvmlDeviceGetUUID(slice_handle)), _text(_nvml.nvmlDeviceGetName(slice_handle))
            places = _mig_places(minor, slice_handle)
            yield Gpu(slice_uuid, index, slice_name, memory_mib, "", numa_node, (), True, uuid, minor, places)

    def _mig_slices(self, handle: Any) -> Iterator[Any]:
        try:
            if int(_nvml.nvmlDeviceGetMigMode(handle)[0]) != _nvml.NVML_DEVICE_MIG_ENABLE:
                return
            count = int(_nvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        except _nvml.NVMLError:
            return
        for number in range(count):
            with contextlib.suppress(_nvml.NVMLError):
                yield _nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)

    def _links(self, handle: Any, handles: list[Any]) -> tuple[str, ...]:
        """UUIDs of the GPUs that NVLink joins to this one."""
        peers: list[str] = []
        for other in handles:
            if other is handle:
                continue
            with contextlib.suppress(_nvml.NVMLError):
                status = _nvml.nvmlDeviceGetP2PStatus(handle, other, _nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                if status == _nvml.NVML_P2P_STATUS_OK:
                    peers.append(_text(_nvml.nvmlDeviceGetUUID(other)))
        return tuple(peers)

    def _sample(self, uuid: str) -> GpuSample:
        try:
            handle = _nvml.nvmlDeviceGetHandleByUUID(uuid)
        except _nvml.NVMLError:
            return GpuSample(uuid)
        return GpuSample(
            uuid,
            _number(lambda: _nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            _number(lambda: _nvml.nvmlDeviceGetMemoryInfo(handle).used // 1024**2),
            _number(lambda: _nvml.nvmlDeviceGetTemperature(handle, _nvml.NVML_TEMPERATURE_GPU)),
            _number(lambda: _nvml.nvmlDeviceGetPowerUsage(handle)),
        )


def _mig_places(minor: int | None, handle: Any) -> tuple[str, ...]:
    instance = _number(lambda: _nvml.nvmlDeviceGetGpuInstanceId(handle))
    compute = _number(lambda: _nvml.nvmlDeviceGetComputeInstanceId(handle))
    if minor is None or instance is None or compute is None:
        return ()
    return (f"gpu{minor}/mig/gi{instance}", f"gpu{minor}/mig/gi{instance}/ci{compute}")


def _number(read: Any) -> int | None:
    try:
        return int(read())
    except _nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


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
        return "the NVIDIA kernel driver is not loaded: `modprobe nvidia`, or reboot after installing it"
    if isinstance(error, _nvml.NVMLError_NoPermission):
        return "no permission on the NVIDIA device files: add the agent's user to the groups video and render"
    return f"NVML could not be started: {error}"
