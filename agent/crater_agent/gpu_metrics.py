"""What the agent tells Prometheus of its GPUs and of the tasks on them: the last reading, never a call to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from crater_agent.gpu_device import Device
from crater_agent.gpu_faults import THROTTLE_NAMES, throttling
from crater_agent.gpu_reading import Reading
from crater_agent.workload import Workload
from crater_core.wire.agents import DeviceDeclaration

_GAUGES = {
    "temperature_celsius": "Temperature",
    "power_milliwatt": "Power drawn",
    "sm_clock_mhz": "Clock of the multiprocessors",
    "memory_clock_mhz": "Clock of the memory",
    "pcie_sent_kib_per_s": "Sent over PCIe",
    "pcie_received_kib_per_s": "Received over PCIe",
    "ecc_corrected": "Corrected ECC errors since the last reset",
    "ecc_uncorrected": "Uncorrectable ECC errors since the last reset",
    "retired_pages": "Pages of memory that are retired",
    "remapped_rows": "Rows of memory that are remapped",
}
"""ECC counts are gauges: a reset begins them anew."""
_COUNTERS = {"nvlink_sent_kib": "Sent over NVLink", "nvlink_received_kib": "Received over NVLink"}
_LABELS = ["node", "uuid", "index", "gpu_type", "simulated"]
_TASK_LABELS = ["node", "task", "allocation", "name", "uuid", "index"]


def of_devices(node: str, devices: Iterable[DeviceDeclaration], watched: Iterable[Device]) -> Iterator[Metric]:
    known = {device.gpu.uuid: device for device in watched}
    total = GaugeMetricFamily("crater_gpu_memory_total_mib", "Memory of the device", labels=_LABELS)
    use = GaugeMetricFamily("crater_gpu_use_percent", "Time in which it computed", labels=_LABELS)
    used = GaugeMetricFamily("crater_gpu_memory_used_mib", "Memory in use", labels=_LABELS)
    healthy = GaugeMetricFamily("crater_gpu_healthy", "1: may be given out; 0: in quarantine", labels=_LABELS)
    xids = CounterMetricFamily("crater_gpu_xids", "Xid events since the agent began", labels=_LABELS)
    gauges = {name: GaugeMetricFamily(f"crater_gpu_{name}", text, labels=_LABELS) for name, text in _GAUGES.items()}
    counters = {name: CounterMetricFamily(f"crater_gpu_{name}", text, labels=_LABELS) for name, text in _COUNTERS.items()}
    throttled = GaugeMetricFamily("crater_gpu_throttled", "1: clocks are held down for this cause", labels=[*_LABELS, "cause"])
    for declared in devices:
        values = [node, declared.uuid, str(declared.index), declared.gpu_type, "true" if declared.simulated else "false"]
        total.add_metric(values, declared.memory_mib)
        device = known.get(declared.uuid)
        if device is None:
            continue
        healthy.add_metric(values, int(not device.quarantine.faults))
        xids.add_metric(values, device.xids)
        if device.glance is not None and not device.glance.error:
            for family, value in ((use, device.glance.use_percent), (used, device.glance.memory_used_mib)):
                if value is not None:
                    family.add_metric(values, value)
        if device.reading is not None and not device.reading.glance.error:
            _add(device.reading, values, {**gauges, **counters})
            if device.reading.throttle_mask is not None:
                causes = throttling(device.reading.throttle_mask)
                for cause in THROTTLE_NAMES:
                    throttled.add_metric([*values, cause], int(cause in causes))
    yield from (total, use, used, healthy, xids, throttled, *gauges.values(), *counters.values())


def _add(reading: Reading, values: list[str], families: dict[str, GaugeMetricFamily | CounterMetricFamily]) -> None:
    for name, family in families.items():
        value = getattr(reading, name)
        if value is not None:
            family.add_metric(values, value)


def of_tasks(node: str, workloads: Iterable[Workload]) -> Iterator[Metric]:
    use = GaugeMetricFamily("crater_task_gpu_use_percent", "Of the device, since the reading before", labels=_TASK_LABELS)
    memory = GaugeMetricFamily("crater_task_gpu_memory_mib", "GPU memory, summed over its processes", labels=_TASK_LABELS)
    limit = GaugeMetricFamily("crater_task_gpu_memory_limit_mib", "Its share, where that is watched", labels=_TASK_LABELS)
    busy = CounterMetricFamily("crater_task_gpu_busy_seconds", "Time in which devices computed for it", labels=_TASK_LABELS[:4])
    for workload in workloads:
        record = workload.record
        if record.gpus:
            busy.add_metric([node, record.task, record.allocation, record.name], workload.use.gpu_busy_ms / 1000)
        for grant in record.gpus:
            values = [node, record.task, record.allocation, record.name, grant.uuid, str(grant.index)]
            if grant.limit_mib:
                limit.add_metric(values, grant.limit_mib)
            seen = workload.gpus.get(grant.uuid)
            if seen is not None:
                memory.add_metric(values, seen.memory_mib)
                if seen.percent is not None:
                    use.add_metric(values, seen.percent)
    yield from (use, memory, limit, busy)
