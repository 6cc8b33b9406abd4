"""Whose the processes on a GPU are when they run in containers: a real engine, and the NVML stand-in for the card.

The engine hands out GPUs where it finds NVIDIA's hook, which is a script here that does nothing: there is no device to hand in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nvml
import pytest
from agent_harness import SchedulerStandIn, poll_until, start_agent
from docker_world import DockerWorld

from crater_core.wire.resources import GrantView

SECONDS = 30
IMAGE = "crater-busybox:1"


@pytest.fixture(scope="module")
def with_hook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DockerWorld]:
    tools = tmp_path_factory.mktemp("tools")
    hook = tools / "nvidia-container-runtime-hook"
    hook.write_text("#!/bin/sh\nexec cat > /dev/null\n")
    hook.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        world = DockerWorld().start()
        try:
            world.add_busybox(IMAGE)
            yield world
        finally:
            world.remove()


def _sleepers(allocation: str) -> list[int]:
    """The pids of a task's `sleep`s as this machine, and with it NVML, numbers them: inside they are others."""
    found: list[int] = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                words, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            except OSError:
                continue
            if words.startswith(b"sleep\0") and f"CRATER_ALLOCATION_ID={allocation}\0".encode() in environ:
                found.append(int(path.name))
    return sorted(found)


def _share() -> GrantView:
    return GrantView(uuid="GPU-a", index=0, compute_milli=250, memory_mib=10_000, sharing="time_slice")


def test_a_process_on_a_gpu_belongs_to_the_task_of_its_container(
    place: Path, scheduler: SchedulerStandIn, with_hook: DockerWorld
):
    card, file = nvml.gpu("GPU-a", use=80), place / "gpus"
    nvml.write(file, [card])
    environ = nvml.environ(nvml.build(place), file)
    settings: dict[str, Any] = {
        "docker": {"socket": str(with_hook.socket)},
        "gpu_sharing": {"enabled": True, "compute_mode": "time_slice"},
        "sample_interval": "5s",
        "resource_pools": None,
    }
    agent = start_agent(place, scheduler.url, environ=environ, **settings)
    try:
        for name in ("a", "b"):
            command = ["sh", "-c", "sleep 60 & sleep 60"]
            scheduler.give(name, command, image=IMAGE, devices=[_share()], grace_ms=500)
        a, b = (poll_until(lambda n=n: len(p := _sleepers(n)) == 2 and p, SECONDS, f"the processes of {n}") for n in ("a", "b"))
        inside = [
            nvml.process("GPU-a", a[0], 3_000, 60),
            nvml.process("GPU-a", a[1], 4_000, 15),
            nvml.process("GPU-a", b[0], 2_000, 25),
        ]
        nvml.write(file, [card, *inside])

        def uses() -> Any:
            found = scheduler.heartbeats[-1]["uses"] if scheduler.heartbeats else {}
            return found if all(found.get(name, {}).get("gpu_percent_milli") for name in ("a", "b")) else None

        seen = poll_until(uses, SECONDS, "the use of both")
        assert {name: (use["gpu_memory_mib"], use["gpu_percent_milli"]) for name, use in seen.items()} == {
            "a": (7_000, 600),
            "b": (2_000, 200),
        }
        # None of them is taken for somebody from outside.
        assert all(device.healthy for declaration in scheduler.declarations for device in declaration.devices)
        nvml.write(file, [card, *inside[:2], nvml.process("GPU-a", b[0], 20_000), nvml.process("GPU-a", b[1], 1_000)])
        end = scheduler.final("b", SECONDS)
        assert (end.reason.code.value, end.reason.facts) == ("gpu_memory_exceeded", {"limit_mib": 10_000, "peak_mib": 21_000})
        assert not [report for report in scheduler.reports_of("a") if report.status.ended]
    finally:
        print(agent.log)
        agent.stop()
        with_hook.clear({"label": [f"crater.agent={agent.group_name}"]})
