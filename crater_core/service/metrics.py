"""Prometheus metrics of the scheduler, on a port of their own; read from the committed state when they are asked for."""

from __future__ import annotations

from collections import Counter as CountOf
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from crater_core import __version__
from crater_core.errors import BadConfiguration
from crater_core.model.resources import Amounts
from crater_core.scheduling import pool_overview
from crater_core.service.engine import Engine

_FAST = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_POOL_LABELS = ("pool", "kind", "resource")
_UNITS = {"cpu_cores": 1000, "memory_bytes": 1, "disk_bytes": 1, "gpu_devices": 1000, "gpu_memory_bytes": 1 / 1024**2}


class AddressInUse(BadConfiguration):
    """A port that the file names is taken."""


class SchedulerMetrics:
    """Implements the engine's `Observer`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._cycle = Histogram("crater_cycle_seconds", "Time of one scheduling cycle", buckets=_FAST, registry=self.registry)
        self._commit = Histogram("crater_commit_seconds", "Time of one durable commit", buckets=_FAST, registry=self.registry)
        self._requests = Counter(
            "crater_http_requests", "Answers of the API", ("method", "route", "status"), registry=self.registry
        )
        self._server: Any = None

    def cycle(self) -> AbstractContextManager[object]:
        return self._cycle.time()

    def commit(self) -> AbstractContextManager[object]:
        return self._commit.time()

    def count(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, str(status)).inc()

    def watch(self, engine: Engine) -> None:
        self.registry.register(_State(engine))

    def serve(self, host: str, port: int) -> int:
        """Start to answer; gives the port (of use when 0 was asked for)."""
        try:
            self._server, _ = start_http_server(port, host, self.registry)
        except OSError as error:
            raise AddressInUse(
                f"metrics cannot be served on {host}:{port}: {error.strerror}; set another metrics.port", field="metrics.port"
            ) from error
        return int(self._server.server_address[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _State:
    """Reads the committed snapshot. Runs in the metrics thread: it takes lists of what it walks over in one step each."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        snapshot = engine.shown.snapshot
        tasks, nodes = list(snapshot.tasks.values()), list(snapshot.nodes.values())
        yield _gauge("crater_build_info", "Version", ("version",), {(__version__,): 1})
        yield _gauge("crater_queue_length", "Tasks that wait", (), {(): len(snapshot.queued)})
        statuses = CountOf((task.status.value,) for task in tasks)
        yield _gauge("crater_tasks", "Live tasks by status", ("status",), statuses)
        waiting = CountOf(
            (reason.code.value,)
            for reason in (engine.shown.reasons.get(t.id, t.reason) for t in tasks if t.id in snapshot.queued)
            if reason
        )
        yield _gauge("crater_waiting_tasks", "Waiting tasks by reason", ("reason",), waiting)
        states = CountOf((node.status.value, str(node.cordoned).lower()) for node in nodes)
        yield _gauge("crater_nodes", "Nodes by status", ("status", "cordoned"), states)
        ages = [engine.heard.age_ms(node.name) / 1000 for node in nodes if node.status.value == "ready"]
        yield _gauge("crater_heartbeat_age_seconds_max", "Longest silence of a ready node", (), {(): max(ages, default=0.0)})
        yield _gauge(
            "crater_store_available", "1 when the last write succeeded", (), {(): float(engine.why_not_writable() is None)}
        )
        yield _gauge("crater_leader", "1 while this scheduler leads", (), {(): float(engine.leading)})
        yield _gauge("crater_revision", "Revision of the store", (), {(): snapshot.revision})
        yield from self._pools()

    def _pools(self) -> Iterator[Metric]:
        try:
            pools = pool_overview(self._engine.shown.snapshot)
        except RuntimeError:  # The loop changed a table while this thread walked over it; the next scrape has it.
            return
        give = GaugeMetricFamily("crater_pool_allocatable", "What a pool's nodes give out in all", labels=_POOL_LABELS)
        free = GaugeMetricFamily("crater_pool_free", "What of it is free now", labels=_POOL_LABELS)
        for pool in pools:
            for family, amounts in ((give, pool.allocatable), (free, pool.free)):
                for resource, amount in _amounts(amounts).items():
                    family.add_metric((pool.name, pool.kind.value, resource), amount)
        yield from (give, free)


def _amounts(amounts: Amounts) -> dict[str, float]:
    values = (amounts.cpu_milli, amounts.memory_bytes, amounts.disk_bytes, amounts.gpu_milli, amounts.gpu_memory_mib)
    return {name: value / unit for (name, unit), value in zip(_UNITS.items(), values, strict=True) if value}


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Any) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
