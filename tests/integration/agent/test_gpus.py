"""Real discovery by the real pynvml, on a library with NVML's symbols that a file steers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nvml
import pytest
from agent_harness import SchedulerStandIn, poll_until

from crater_core.wire.resources import GrantView

SCRIPT = """
import dataclasses, json
from crater_agent.nvml import Nvml
door = Nvml()
found = door.discover()
readings = [door.read(gpu, 0)[0] for gpu in found.gpus]
door.close()
print(json.dumps([dataclasses.asdict(found), [dataclasses.asdict(reading) for reading in readings]]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


def _discover(library: Path, tmp_path: Path, *lines: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    nvml.write(tmp_path / "gpus", lines)
    env = {**nvml.environ(library, tmp_path / "gpus"), "PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=True)
    found, readings = json.loads(answer.stdout)
    return found, readings


def test_gpus_are_counted_in_pci_order_with_their_links(library: Path, tmp_path: Path):
    found, readings = _discover(
        library,
        tmp_path,
        nvml.gpu("GPU-b", bus="00000000:C1:00.0"),
        nvml.gpu("GPU-a", bus="00000000:01:00.0", used_mib=1_000, use=93),
        nvml.gpu("GPU-c", bus="00000001:01:00.0", milliwatt=0),
        "link GPU-a GPU-b",
    )
    assert [(gpu["index"], gpu["uuid"], gpu["links"]) for gpu in found["gpus"]] == [
        (0, "GPU-a", ["GPU-b"]),
        (1, "GPU-b", ["GPU-a"]),
        (2, "GPU-c", []),
    ]
    assert (found["driver_version"], found["cuda_version"]) == ("570.86.15", "12.8")
    assert [gpu["compute_capability"] for gpu in found["gpus"]] == ["8.0"] * 3
    assert readings[2]["power_milliwatt"] is None


def test_all_that_a_card_says_is_read(library: Path, tmp_path: Path):
    more = nvml.values("GPU-a", nvlink_tx=7_000, nvlink_rx=8_000, retired=3, retired_pending=1, remap_pending=1, throttle=0x40)
    more += nvml.values("GPU-a", ecc_uncorrected=2, remapped=4, recovery=1, reserved=600, sm_clock=1_980)
    processes = [
        nvml.process("GPU-a", 11, 400, 30),
        nvml.process("GPU-a", 12, 500, 40, "mps"),
        nvml.process("GPU-a", 11, 450, 0, "mps"),
    ]
    _, (reading,) = _discover(library, tmp_path, nvml.gpu("GPU-a", used_mib=1_000, use=93), *more, *processes)
    assert reading == {
        "glance": {
            "uuid": "GPU-a",
            "use_percent": 93,
            "memory_used_mib": 1_000,
            "holders": [
                {"pid": 11, "memory_mib": 450, "computes": True},
                {"pid": 12, "memory_mib": 500, "computes": True},
            ],
            "error": "",
        },
        "temperature_celsius": 40,
        "power_milliwatt": 60_000,
        "sm_clock_mhz": 1_980,
        "memory_clock_mhz": 1_215,
        "pcie_sent_kib_per_s": 100,
        "pcie_received_kib_per_s": 200,
        "nvlink_sent_kib": 7_000,
        "nvlink_received_kib": 8_000,
        "ecc_corrected": 0,
        "ecc_uncorrected": 2,
        "retired_pages": 3,
        "retirement_pending": True,
        "remapped_rows": 4,
        "remap_pending": True,
        "remap_failed": False,
        "throttle_mask": 0x40,
        "recovery": 1,
        "use_percent_max": 93,
        "process_use": {"11": 30, "12": 40},
    }


def test_what_a_card_does_not_support_is_left_open(library: Path, tmp_path: Path):
    less = nvml.values(
        "GPU-a", ecc_corrected=-1, ecc_uncorrected=-1, remapped=-1, throttle=-1, process_use=0, sm_clock=-1, pcie_tx=-1
    )
    fails = [f"fail GPU-a nvmlDeviceGet{kind}RunningProcesses_v3 3" for kind in ("Compute", "MPSCompute", "Graphics")]
    _, (reading,) = _discover(library, tmp_path, nvml.gpu("GPU-a"), *less, *fails, "fail GPU-a nvmlDeviceGetMemoryInfo_v2 3")
    silent = (
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows",
        "remap_pending",
        "throttle_mask",
        "process_use",
        "sm_clock_mhz",
    )
    assert [reading[name] for name in (*silent, "pcie_sent_kib_per_s", "nvlink_sent_kib", "recovery")] == [None] * 10
    assert (reading["glance"]["holders"], reading["glance"]["memory_used_mib"]) == (None, 100)


def test_a_card_that_does_not_say_how_much_memory_it_has_is_no_lost_one(library: Path, tmp_path: Path):
    fails = [f"fail GPU-a nvmlDeviceGetMemoryInfo{version} 3" for version in ("", "_v2")]
    found, (reading,) = _discover(library, tmp_path, nvml.gpu("GPU-a", name="NVIDIA GB10", use=12), *fails)
    assert [(gpu["uuid"], gpu["memory_mib"]) for gpu in found["gpus"]] == [("GPU-a", 0)]
    glance = reading["glance"]
    assert (found["note"], glance["error"], glance["memory_used_mib"], glance["use_percent"]) == ("", "", None, 12)


def test_a_card_that_is_lost_stays_so_until_the_library_is_opened_anew(library: Path, tmp_path: Path):
    script = """
import json, pathlib, sys
from crater_agent.nvml import Nvml
file = pathlib.Path(sys.argv[1])
whole = file.read_text()
door = Nvml()
(gpu,) = door.discover().gpus
seen = []
for text in (whole, "", whole):
    file.write_text(text)
    seen.append(door.glance(gpu.uuid).error)
door.reopen()
seen.append(door.glance(gpu.uuid).error)
seen.append(door.openings)
print(json.dumps(seen))
"""
    file = tmp_path / "gpus"
    nvml.write(file, [nvml.gpu("GPU-a")])
    env = {**nvml.environ(library, file), "PYTHONPATH": ":".join(sys.path)}
    answer = subprocess.run([sys.executable, "-c", script, str(file)], env=env, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == ["", "GPU is lost", "GPU is lost", "", 2]


def test_mig_slices_stand_for_their_card(library: Path, tmp_path: Path):
    found, _ = _discover(
        library,
        tmp_path,
        nvml.gpu("GPU-a", mig=1),
        "slice GPU-a MIG-1 20096 NVIDIA A100-SXM4-80GB MIG 2g.20gb",
        "slice GPU-a MIG-2 40192 NVIDIA A100-SXM4-80GB MIG 3g.40gb",
    )
    assert [(gpu["uuid"], gpu["memory_mib"], gpu["mig"], gpu["parent_uuid"]) for gpu in found["gpus"]] == [
        ("MIG-1", 20_096, True, "GPU-a"),
        ("MIG-2", 40_192, True, "GPU-a"),
    ]
    assert [gpu["card_milli"] for gpu in found["gpus"]] == [285, 428]


def test_a_lost_card_does_not_hide_the_others(library: Path, tmp_path: Path):
    found, _ = _discover(library, tmp_path, nvml.gpu("GPU-a", answer=15), nvml.gpu("GPU-b", bus="00000000:02:00.0"))
    assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-b"]
    assert "GPU 0: GPU is lost" in found["note"]


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        (["init 9"], "the NVIDIA kernel driver is not loaded"),
        (["init 4"], "no permission on the NVIDIA device files: add the agent's user to the groups video and render"),
        (["init 999"], "NVML could not be started"),
        ([], "the NVIDIA driver 570.86.15 is there, but shows no GPU"),
    ],
)
def test_no_gpu_has_a_cause(library: Path, tmp_path: Path, lines: list[str], note: str):
    found, _ = _discover(library, tmp_path, *lines)
    assert (found["gpus"], note in found["note"]) == ([], True)


def test_a_task_sees_its_own_cards_by_uuid(library: Path, place: Path, start, scheduler: SchedulerStandIn):
    nvml.write(place / "gpus", [nvml.gpu("GPU-a"), nvml.gpu("GPU-b", bus="00000000:02:00.0", name="NVIDIA H100 PCIe")])
    pools = [{"name": "train", "type": "gpu", "devices": [1]}]
    environ = {**nvml.environ(library, place / "gpus"), "CUDA_VISIBLE_DEVICES": "0"}
    sharing = {"enabled": True, "compute_mode": "time_slice", "memory_overcommit_ratio": 1.5}
    start(environ=environ, resource_pools=pools, gpu_sharing=sharing)
    declaration = scheduler.declaration
    (device,) = declaration.devices
    assert (device.uuid, device.index, device.pool, device.gpu_type) == ("GPU-b", 1, "train", "nvidia-h100")
    assert (device.sharing.value, device.overcommit_milli, device.simulated) == ("time_slice", 1500, False)
    assert declaration.labels == {"gpu_type": "nvidia-h100", "cuda": "12.8", "driver": "570.86.15"}
    assert device.compute_capability == "8.0"
    grant = GrantView(uuid="GPU-b", index=1, compute_milli=500, memory_mib=40_000, sharing="time_slice")
    scheduler.give(
        "a", ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER $CRATER_GPU_COMPUTE_MILLI"'], devices=[grant]
    )
    scheduler.final("a")
    assert scheduler.read_log_text("a") == "GPU-b PCI_BUS_ID 500\n"


def test_without_the_control_program_no_share_by_mps_is_offered(library: Path, place: Path, start, scheduler: SchedulerStandIn):
    nvml.write(place / "gpus", [nvml.gpu("GPU-a")])
    start(
        environ=nvml.environ(library, place / "gpus"), resource_pools=None, gpu_sharing={"enabled": True, "compute_mode": "mps"}
    )
    poll_until(lambda: scheduler.declaration.devices[0].unwell, what="the card out")
    device = scheduler.declaration.devices[0]
    assert (device.sharing.value, device.healthy) == ("mps", False)
    assert device.unwell == "MPS: nvidia-cuda-mps-control was not found on the agent's PATH"


def test_without_a_driver_the_node_says_so_once_and_goes_on(library: Path, place: Path, start, scheduler: SchedulerStandIn):
    nvml.write(place / "gpus", ["init 9"])
    agent = start(environ=nvml.environ(library, place / "gpus"), resource_pools=None)
    assert [note for note in scheduler.declaration.notes if "NVIDIA kernel driver is not loaded" in note]
    poll_until(lambda: len(scheduler.heartbeats) >= 2)
    assert agent.log.count("NVIDIA kernel driver is not loaded") == 1
