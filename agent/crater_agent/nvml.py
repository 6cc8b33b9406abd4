"""The one door to NVML (`pynvml`): which NVIDIA GPUs this machine has, and how they are now."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pynvml as _pynvml

from crater_agent.gpu_access import why_closed
from crater_agent.gpu_reading import Glance, Holder, Reading, XidEvent

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
            driver = _text(_nvml.nvmlSystemGetDriverVersion())
            cuda = _number(_nvml.nvmlSystemGetCudaDriverVersion_v2)
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
            return self._glance(uuid)

    def read(self, gpu: Gpu, since_us: int) -> tuple[Reading, int]:
        """All of one device, and the time stamp of its newest sample of use by process: hand it in the next time."""
        with self._in():
            glance = self._glance(gpu.uuid)
            if glance.error:
                return Reading(glance, process_use=None), since_us
            try:
                card = _nvml.nvmlDeviceGetHandleByUUID(gpu.card)
            except _nvml.NVMLError as error:
                return Reading(Glance(gpu.uuid, error=str(error)), process_use=None), since_us
            use, newest_us = _process_use(card, since_us) if not gpu.mig else (None, since_us)
            return _reading(glance, card, use), newest_us

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
                handles.append((_text(_nvml.nvmlDeviceGetPciInfo(handle).busId).lower(), handle))
            except _nvml.NVMLError as error:
                notes.append(f"GPU {number}: {_trouble(error)}")
        return [handle for _, handle in sorted(handles, key=lambda pair: pair[0])]

    def _describe(self, handle: Any, index: int, handles: list[Any]) -> Iterator[Gpu]:
        uuid, name = _text(_nvml.nvmlDeviceGetUUID(handle)), _text(_nvml.nvmlDeviceGetName(handle))
        slices = list(self._mig_slices(handle))
        numa_node = _numa_node(_text(_nvml.nvmlDeviceGetPciInfo(handle).busId))
        minor = _number(lambda: _nvml.nvmlDeviceGetMinorNumber(handle))
        capability = _capability(handle)
        if not slices:
            memory_mib = _memory_mib(handle)
            bus_id = _text(_nvml.nvmlDeviceGetPciInfo(handle).busId)
            links = self._links(handle, handles)
            yield Gpu(uuid, index, name, memory_mib, bus_id, numa_node, links, minor=minor, compute_capability=capability)
        for slice_handle in slices:
            memory_mib = _memory_mib(slice_handle)
            slice_uuid, slice_name = _text(_nvml.nvmlDeviceGetUUID(slice_handle)), _text(_nvml.nvmlDeviceGetName(slice_handle))
            places = _mig_places(minor, slice_handle)
            yield Gpu(slice_uuid, index, slice_name, memory_mib, "", numa_node, (), True, uuid, minor, places, capability)

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

    def _glance(self, uuid: str) -> Glance:
        try:
            handle = _nvml.nvmlDeviceGetHandleByUUID(uuid)
            used_mib = _used_mib(handle)
        except _nvml.NVMLError as error:
            return Glance(uuid, error=str(error))
        use = _number(lambda: _nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return Glance(uuid, use, used_mib, _holders(handle))


def _memory_mib(handle: Any) -> int:
    """0 where it does not say, as a GPU that shares the memory of its host."""
    try:
        return int(_nvml.nvmlDeviceGetMemoryInfo(handle).total) // 1024**2
    except _nvml.NVMLError_NotSupported:
        return 0


def _used_mib(handle: Any) -> int | None:
    """Without what the driver keeps for itself, where it can tell the two apart."""
    try:
        info = _nvml.nvmlDeviceGetMemoryInfo(handle, _nvml.nvmlMemory_v2)
    except (_nvml.NVMLLibraryMismatchError, _nvml.NVMLError_FunctionNotFound, _nvml.NVMLError_NotSupported):
        try:
            info = _nvml.nvmlDeviceGetMemoryInfo(handle)
        except _nvml.NVMLError_NotSupported:
            return None
    return int(info.used) // 1024**2


def _holders(handle: Any) -> tuple[Holder, ...] | None:
    """A process that is in several lists counts once, with the most. None where none of the lists can be had."""
    found: dict[int, Holder] = {}
    known = False
    for read, computes in (
        (_nvml.nvmlDeviceGetComputeRunningProcesses_v3, True),
        (_nvml.nvmlDeviceGetMPSComputeRunningProcesses_v3, True),
        (_nvml.nvmlDeviceGetGraphicsRunningProcesses_v3, False),
    ):
        with contextlib.suppress(_nvml.NVMLError):
            for process in read(handle):
                pid, memory = int(process.pid), process.usedGpuMemory
                mib = None if memory is None else int(memory) // 1024**2
                before = found.get(pid, Holder(pid, None, False))
                most = mib if before.memory_mib is None else max(before.memory_mib, mib or 0)
                found[pid] = Holder(pid, most, before.computes or computes)
            known = True
    return tuple(found[pid] for pid in sorted(found)) if known else None


def _process_use(handle: Any, since_us: int) -> tuple[Mapping[int, int] | None, int]:
    """The mean of the samples of each process since then."""
    try:
        samples = _nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except _nvml.NVMLError_NotFound:
        return {}, since_us
    except _nvml.NVMLError:
        return None, since_us
    uses: dict[int, list[int]] = {}
    for sample in samples:
        # The driver may leave room at the end empty, and samples of long ago in it.
        if sample.pid and sample.timeStamp > since_us and sample.smUtil <= 100:
            uses.setdefault(int(sample.pid), []).append(int(sample.smUtil))
    newest_us = max((int(sample.timeStamp) for sample in samples if sample.pid), default=since_us)
    return {pid: round(sum(found) / len(found)) for pid, found in uses.items()}, max(since_us, newest_us)


def _reading(glance: Glance, card: Any, use: Mapping[int, int] | None) -> Reading:
    n = _nvml
    remapped = _tried(lambda: n.nvmlDeviceGetRemappedRows(card))
    fields = _fields(card)
    causes = (n.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, n.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    volatile, corrected, uncorrected = (
        n.NVML_VOLATILE_ECC,
        n.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    )
    pending = _number(lambda: n.nvmlDeviceGetRetiredPagesPendingStatus(card))
    return Reading(
        glance,
        temperature_celsius=_number(lambda: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU)),
        power_milliwatt=_number(lambda: n.nvmlDeviceGetPowerUsage(card)),
        sm_clock_mhz=_number(lambda: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM)),
        memory_clock_mhz=_number(lambda: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_MEM)),
        pcie_sent_kib_per_s=_number(lambda: n.nvmlDeviceGetPcieThroughput(card, n.NVML_PCIE_UTIL_TX_BYTES)),
        pcie_received_kib_per_s=_number(lambda: n.nvmlDeviceGetPcieThroughput(card, n.NVML_PCIE_UTIL_RX_BYTES)),
        nvlink_sent_kib=fields.get(n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        nvlink_received_kib=fields.get(n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        ecc_corrected=_number(lambda: n.nvmlDeviceGetTotalEccErrors(card, corrected, volatile)),
        ecc_uncorrected=_number(lambda: n.nvmlDeviceGetTotalEccErrors(card, uncorrected, volatile)),
        retired_pages=_number(lambda: sum(len(n.nvmlDeviceGetRetiredPages(card, cause)) for cause in causes)),
        retirement_pending=None if pending is None else bool(pending),
        remapped_rows=None if remapped is None else int(remapped[0]) + int(remapped[1]),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        throttle_mask=_throttle_mask(card),
        recovery=fields.get(n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION),
        use_percent_max=glance.use_percent,
        process_use=use,
    )


def _throttle_mask(card: Any) -> int | None:
    """By its name of today, or by that of drivers before 535."""
    mask = _number(lambda: _nvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    return mask if mask is not None else _number(lambda: _nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


def _fields(card: Any) -> dict[int, int]:
    """Of some values that have no call of their own, those that the card gives. NVLink's are sums over its links."""
    n = _nvml
    every_link = 0xFFFFFFFF
    asked = [
        (n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, every_link),
        (n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, every_link),
        (n.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0),
    ]
    values = _tried(lambda: n.nvmlDeviceGetFieldValues(card, asked)) or ()
    wide = (n.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, n.NVML_VALUE_TYPE_UNSIGNED_LONG)
    return {
        int(value.fieldId): int(value.value.ullVal if value.valueType in wide else value.value.uiVal)
        for value in values
        if value.nvmlReturn == n.NVML_SUCCESS
    }


def _capability(handle: Any) -> str:
    found = _tried(lambda: _nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return f"{found[0]}.{found[1]}" if found is not None else ""


def _version(cuda: int) -> str:
    """12080 as 12.8."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def _tried(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _nvml.NVMLError:
        return None


def _mig_places(minor: int | None, handle: Any) -> tuple[str, ...]:
    instance = _number(lambda: _nvml.nvmlDeviceGetGpuInstanceId(handle))
    compute = _number(lambda: _nvml.nvmlDeviceGetComputeInstanceId(handle))
    if minor is None or instance is None or compute is None:
        return ()
    return (f"gpu{minor}/mig/gi{instance}", f"gpu{minor}/mig/gi{instance}/ci{compute}")


def _number(read: Callable[[], Any]) -> int | None:
    value = _tried(read)
    return None if value is None else int(value)


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
        return why_closed() or "the NVIDIA kernel driver is not loaded: `modprobe nvidia`, or reboot after installing it"
    if isinstance(error, _nvml.NVMLError_NoPermission):
        return _no_permission()
    return f"NVML could not be started: {error}"


def _trouble(error: Any) -> str:
    return _no_permission() if isinstance(error, _nvml.NVMLError_NoPermission) else str(error)


def _no_permission() -> str:
    why = why_closed() or "add the agent's user to the groups video and render"
    return f"no permission on the NVIDIA device files: {why}"
