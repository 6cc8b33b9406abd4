"""What NVML says of one GPU, by its handle: every value that a card does not give is None, or what its docstring says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import pynvml as _pynvml

from crater_agent.gpu_reading import Glance, Holder, Reading

# The library has no type information.
_nvml = cast(Any, _pynvml)


def glance_at(uuid: str) -> Glance:
    try:
        handle = _nvml.nvmlDeviceGetHandleByUUID(uuid)
        used_mib = _used_mib(handle)
    except _nvml.NVMLError as error:
        return Glance(uuid, error=str(error))
    use = number_or_none(lambda: _nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    return Glance(uuid, use, used_mib, _holders(handle))


def memory_mib_of(handle: Any) -> int:
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


def process_use(handle: Any, since_us: int) -> tuple[Mapping[int, int] | None, int]:
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


def reading_of(glance: Glance, card: Any, use: Mapping[int, int] | None) -> Reading:
    n = _nvml
    remapped = _tried(lambda: n.nvmlDeviceGetRemappedRows(card))
    fields = _fields(card)
    causes = (n.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, n.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    volatile, corrected, uncorrected = (
        n.NVML_VOLATILE_ECC,
        n.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    )
    pending = number_or_none(lambda: n.nvmlDeviceGetRetiredPagesPendingStatus(card))
    return Reading(
        glance,
        temperature_celsius=number_or_none(lambda: n.nvmlDeviceGetTemperature(card, n.NVML_TEMPERATURE_GPU)),
        power_milliwatt=number_or_none(lambda: n.nvmlDeviceGetPowerUsage(card)),
        sm_clock_mhz=number_or_none(lambda: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_SM)),
        memory_clock_mhz=number_or_none(lambda: n.nvmlDeviceGetClockInfo(card, n.NVML_CLOCK_MEM)),
        pcie_sent_kib_per_s=number_or_none(lambda: n.nvmlDeviceGetPcieThroughput(card, n.NVML_PCIE_UTIL_TX_BYTES)),
        pcie_received_kib_per_s=number_or_none(lambda: n.nvmlDeviceGetPcieThroughput(card, n.NVML_PCIE_UTIL_RX_BYTES)),
        nvlink_sent_kib=fields.get(n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
        nvlink_received_kib=fields.get(n.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        ecc_corrected=number_or_none(lambda: n.nvmlDeviceGetTotalEccErrors(card, corrected, volatile)),
        ecc_uncorrected=number_or_none(lambda: n.nvmlDeviceGetTotalEccErrors(card, uncorrected, volatile)),
        retired_pages=number_or_none(lambda: sum(len(n.nvmlDeviceGetRetiredPages(card, cause)) for cause in causes)),
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
    mask = number_or_none(lambda: _nvml.nvmlDeviceGetCurrentClocksEventReasons(card))
    return mask if mask is not None else number_or_none(lambda: _nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))


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


def capability_of(handle: Any) -> str:
    found = _tried(lambda: _nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return f"{found[0]}.{found[1]}" if found is not None else ""


def mig_places_of(minor: int | None, handle: Any) -> tuple[str, ...]:
    instance = number_or_none(lambda: _nvml.nvmlDeviceGetGpuInstanceId(handle))
    compute = number_or_none(lambda: _nvml.nvmlDeviceGetComputeInstanceId(handle))
    if minor is None or instance is None or compute is None:
        return ()
    return (f"gpu{minor}/mig/gi{instance}", f"gpu{minor}/mig/gi{instance}/ci{compute}")


def _tried(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _nvml.NVMLError:
        return None


def number_or_none(read: Callable[[], Any]) -> int | None:
    value = _tried(read)
    return None if value is None else int(value)


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
