"""What the agent tells Prometheus: the node, its GPUs and its tasks, as they were last measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from crater_agent import gpu_metrics
from crater_agent.gpu_device import Device
from crater_agent.machine import MachineSample
from crater_agent.node_watch import GROWING, NodeWatch, Rates
from crater_agent.workload import Workload
from crater_core.wire.agents import DeviceDeclaration

_prometheus = cast(Any, prometheus_client)


class Metrics:
    """A registry of its own, so that two agents in one process do not share one."""

    def __init__(
        self,
        node: str,
        version: str,
        devices: tuple[DeviceDeclaration, ...],
        machine: NodeWatch,
        gpus: Callable[[], tuple[Device, ...]],
        workloads: Callable[[], Iterable[Workload]],
        round_trip_ms: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._node, self._version, self._devices = node, version, devices
        self._machine, self._gpus, self._workloads = machine, gpus, workloads
        self._round_trip_ms = round_trip_ms
        self._registry = _prometheus.CollectorRegistry()
        self._registry.register(self)
        _prometheus.ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        return cast(bytes, _prometheus.generate_latest(self._registry)), str(_prometheus.CONTENT_TYPE_LATEST)

    def describe(self) -> Iterable[Metric]:
        """Nothing to say before the first reading: without this the registry would take one at start."""
        return ()

    def collect(self) -> Iterable[Metric]:
        yield self._gauge("crater_agent_info", "What runs here", {"version": self._version}, 1)
        yield from self._of_machine(self._machine.last)
        yield from self._of_rates(self._machine.rates)
        round_trip_ms = self._round_trip_ms()
        if round_trip_ms is not None:
            text = "Time that the last heartbeat took, there and back"
            yield self._gauge("crater_node_scheduler_round_trip_seconds", text, {}, round_trip_ms / 1000)
        running = [workload for workload in self._workloads() if workload.running]
        yield from gpu_metrics.of_devices(self._node, self._devices, self._gpus())
        yield from gpu_metrics.of_tasks(self._node, running)
        yield from self._of_tasks(running)

    def _of_machine(self, sample: MachineSample) -> Iterable[Metric]:
        cpu = CounterMetricFamily("crater_node_cpu_seconds", "CPU time since boot", labels=["node", "mode"])
        for mode, seconds in sample.cpu_seconds.items():
            cpu.add_metric([self._node, mode], seconds)
        yield cpu
        gauges = {
            "crater_node_load1": ("Processes that run or wait, mean of one minute", sample.load_1m),
            "crater_node_load5": ("Processes that run or wait, mean of five minutes", sample.load_5m),
            "crater_node_load15": ("Processes that run or wait, mean of fifteen minutes", sample.load_15m),
            "crater_node_memory_total_bytes": ("Memory of the node", sample.memory_total_bytes),
            "crater_node_memory_available_bytes": ("Memory that could be had without swapping", sample.memory_available_bytes),
            "crater_node_memory_cached_bytes": ("Page cache", sample.memory_cached_bytes),
            "crater_node_swap_used_bytes": ("Swap in use", sample.swap_used_bytes),
            "crater_node_disk_total_bytes": ("Size of the file system with the scratch directories", sample.disk_total_bytes),
            "crater_node_disk_free_bytes": ("What is free on it", sample.disk_free_bytes),
        }
        counters = {
            "crater_node_context_switches": ("Context switches since boot", sample.context_switches),
            "crater_node_disk_read_bytes": ("Read from disks since boot", sample.disk_read_bytes),
            "crater_node_disk_written_bytes": ("Written to disks since boot", sample.disk_written_bytes),
            "crater_node_disk_reads": ("Read operations since boot", sample.disk_reads),
            "crater_node_disk_writes": ("Write operations since boot", sample.disk_writes),
            "crater_node_network_received_bytes": ("Received since boot", sample.network_received_bytes),
            "crater_node_network_sent_bytes": ("Sent since boot", sample.network_sent_bytes),
            "crater_node_network_errors": ("Network errors since boot", sample.network_errors),
        }
        for name, (text, value) in gauges.items():
            yield self._gauge(name, text, {}, value)
        for name, (text, value) in counters.items():
            family = CounterMetricFamily(name, text, labels=["node"])
            family.add_metric([self._node], value)
            yield family

    def _of_rates(self, rates: Rates | None) -> Iterable[Metric]:
        if rates is None:
            return
        use = "CPU in use between the last two samples, of all cores together"
        yield self._gauge("crater_node_cpu_use_ratio", use, {}, rates.cpu_use_milli / 1000)
        for name in GROWING:
            text = f"How fast crater_node_{name}_total grew between the last two samples"
            yield self._gauge(f"crater_node_{name}_per_second", text, {}, getattr(rates, name))

    def _of_tasks(self, workloads: list[Workload]) -> Iterable[Metric]:
        labels = ["node", "task", "allocation", "name"]
        cpu = CounterMetricFamily("crater_task_cpu_seconds", "CPU time of a running task", labels=labels)
        memory = GaugeMetricFamily("crater_task_memory_bytes", "Memory of a running task", labels=labels)
        limit = GaugeMetricFamily("crater_task_memory_limit_bytes", "What it may use", labels=labels)
        disk = GaugeMetricFamily("crater_task_disk_bytes", "Scratch space of a running task", labels=labels)
        for workload in workloads:
            record, use = workload.record, workload.use
            values = [self._node, record.task, record.allocation, record.name]
            cpu.add_metric(values, use.cpu_ms / 1000)
            memory.add_metric(values, use.memory_bytes)
            limit.add_metric(values, record.memory_bytes)
            disk.add_metric(values, use.disk_bytes)
        yield from (cpu, memory, limit, disk)
        yield self._gauge("crater_node_tasks_running", "Tasks on this node", {}, len(workloads))

    def _gauge(self, name: str, text: str, labels: dict[str, str], value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["node", *labels])
        family.add_metric([self._node, *labels.values()], value)
        return family
