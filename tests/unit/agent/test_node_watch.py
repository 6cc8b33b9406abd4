"""The node's own samples: what two of them say of the time between."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from crater_agent import machine, node_watch
from crater_agent.machine import CPU_MODES, MachineSample
from crater_agent.metrics import Metrics
from crater_agent.node_watch import NodeWatch, Rates, rates
from crater_core.clock import ManualClock

FIRST = MachineSample(
    cpu_seconds=dict.fromkeys(CPU_MODES, 100.0),
    load_1m=0.5,
    load_5m=0.4,
    load_15m=0.3,
    context_switches=1000,
    memory_total_bytes=8_000,
    memory_available_bytes=6_000,
    memory_cached_bytes=1_000,
    swap_used_bytes=10,
    disk_total_bytes=500,
    disk_free_bytes=300,
    disk_read_bytes=10_000,
    disk_written_bytes=20_000,
    disk_reads=100,
    disk_writes=200,
    network_received_bytes=5_000,
    network_sent_bytes=6_000,
    network_errors=1,
)
SECOND = replace(
    FIRST,
    cpu_seconds={**FIRST.cpu_seconds, "user": 104.0, "system": 101.0, "idle": 113.0, "iowait": 102.0},
    context_switches=16_000,
    disk_reads=250,
    disk_writes=1_700,
    disk_read_bytes=25_000,
    disk_written_bytes=170_000,
    network_received_bytes=8_000,
    network_sent_bytes=7_500,
    network_errors=4,
)


def test_two_samples_say_how_busy_the_node_was_between_them():
    # Of 20 seconds of core time 13 were idle and 2 waited for the disk.
    assert rates(FIRST, SECOND, 15_000) == Rates(250, 1000.0, 10.0, 100.0, 1000.0, 10_000.0, 200.0, 100.0, 0.2)


def test_a_counter_that_fell_counts_as_unchanged_and_no_time_gives_no_rate():
    found = rates(SECOND, FIRST, 1_000)
    assert found is not None
    assert (found.cpu_use_milli, found.disk_reads, found.network_errors) == (0, 0.0, 0.0)
    assert rates(FIRST, SECOND, 0) is None


def test_the_interval_of_the_file_is_how_long_it_waits_between_two_looks(monkeypatch):
    clock, samples, slept = ManualClock(), iter([FIRST, SECOND]), list[float]()
    watch = NodeWatch(lambda: next(samples), 7_000, clock)
    assert (watch.last, watch.rates) == (FIRST, None)

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(int(seconds * 1000))
        if len(slept) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(node_watch.asyncio, "sleep", sleep)
    task = watch.run()
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(task)
    assert slept == [7.0, 7.0]
    assert watch.last == SECOND
    assert watch.rates == rates(FIRST, SECOND, 7_000)


def test_a_look_that_fails_is_taken_again_the_next_time(monkeypatch):
    clock, calls = ManualClock(), list[int]()

    def take() -> MachineSample:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(2, "gone")
        return FIRST if len(calls) == 1 else SECOND

    async def sleep(seconds: float) -> None:
        clock.advance(int(seconds * 1000))
        if len(calls) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(node_watch.asyncio, "sleep", sleep)
    watch = NodeWatch(take, 5_000, clock)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(watch.run())
    # Over both intervals: the failed look left no hole.
    assert watch.rates == rates(FIRST, SECOND, 10_000)


def test_the_metrics_are_those_of_the_last_sample():
    clock, samples = ManualClock(), iter([FIRST, SECOND])
    watch = NodeWatch(lambda: next(samples), 15_000, clock)
    metrics = Metrics("n1", "1", (), watch, lambda: (), lambda: (), lambda: 12)
    first = metrics.render()[0].decode()
    assert 'crater_node_context_switches_total{node="n1"} 1000.0' in first
    assert "crater_node_cpu_use_ratio" not in first
    clock.advance(15_000)
    watch.look()
    said = dict(line.rsplit(" ", 1) for line in metrics.render()[0].decode().splitlines() if line.startswith("crater_node"))
    node = '{node="n1"}'
    assert said[f"crater_node_cpu_use_ratio{node}"] == "0.25"
    assert said[f"crater_node_load1{node}"] == "0.5"
    assert said[f"crater_node_context_switches_per_second{node}"] == "1000.0"
    assert said[f"crater_node_disk_reads_per_second{node}"] == "10.0"
    assert said[f"crater_node_disk_writes_per_second{node}"] == "100.0"
    assert said[f"crater_node_disk_written_bytes_per_second{node}"] == "10000.0"
    assert said[f"crater_node_disk_free_bytes{node}"] == "300.0"
    assert said[f"crater_node_memory_cached_bytes{node}"] == "1000.0"
    assert said[f"crater_node_swap_used_bytes{node}"] == "10.0"
    assert said[f"crater_node_network_errors_total{node}"] == "4.0"
    assert said[f"crater_node_network_received_bytes_per_second{node}"] == "200.0"
    assert said[f"crater_node_scheduler_round_trip_seconds{node}"] == "0.012"


def test_a_real_sample_has_all_of_it(tmp_path: Path):
    sample = machine.sample(tmp_path)
    assert set(sample.cpu_seconds) == set(CPU_MODES)
    assert sample.cpu_seconds["idle"] > 0
    assert sample.context_switches > 0
    assert 0 < sample.memory_available_bytes <= sample.memory_total_bytes
    assert 0 < sample.disk_free_bytes <= sample.disk_total_bytes
