"""What a node offers, from its file and its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from crater_agent.config import AgentConfig
from crater_agent.declare import Found, declare, gpu_type
from crater_agent.machine import Disk, Machine
from crater_agent.nvml import Discovery, Gpu
from crater_core.configuration import parse_yaml
from crater_core.errors import BadConfiguration
from crater_core.model.node import PoolKind, SharingMode
from crater_core.model.units import GIB

FOUND = Found(Machine(cores=16, memory_bytes=64 * GIB), Disk(total_bytes=10**12, free_bytes=4 * 10**11))
TWO_CARDS = Discovery(
    (Gpu("GPU-a", 0, "NVIDIA A100-SXM4-80GB", 81_920, links=("GPU-b",)), Gpu("GPU-b", 1, "NVIDIA A100-SXM4-80GB", 81_920)), "570"
)


def _declare(text: str, found: Found = FOUND):
    config = parse_yaml(f"scheduler_endpoint: http://s:8080\nnode_name: n1\n{text}", AgentConfig, "agent.yaml")
    return declare(config, found)


def test_without_pools_everything_the_machine_has_is_offered():
    node = _declare("", Found(FOUND.machine, FOUND.disk, TWO_CARDS))
    assert node.pools == {
        "cpu-pool": PoolKind.CPU,
        "memory-pool": PoolKind.MEMORY,
        "disk-pool": PoolKind.DISK,
        "gpu-pool": PoolKind.GPU,
    }
    assert (node.capacity.cpu_milli, node.capacity.memory_bytes, node.capacity.disk_bytes) == (16_000, 64 * GIB, 4 * 10**11)
    assert [device.uuid for device in node.devices] == ["GPU-a", "GPU-b"]
    assert node.labels == {"gpu_type": "nvidia-a100", "driver": "570"}


def test_what_is_reserved_is_capacity_but_not_allocatable():
    node = _declare(
        "resource_pools:\n  - {type: cpu, cores: 12, reserved_cores: 1.5}\n  - {type: memory, size_gb: 32, reserved_gb: 2}\n"
    )
    assert (node.capacity.cpu_milli, node.allocatable.cpu_milli) == (12_000, 10_500)
    assert (node.capacity.memory_bytes, node.allocatable.memory_bytes) == (32 * 10**9, 30 * 10**9)
    assert node.capacity.disk_bytes == 0


def test_devices_are_filtered_by_index_into_their_pools():
    node = _declare(
        "resource_pools:\n  - {name: a, type: gpu, devices: [1]}\n  - {name: b, type: gpu, devices: [0]}\n",
        Found(FOUND.machine, FOUND.disk, TWO_CARDS),
    )
    assert [(device.uuid, device.pool) for device in node.devices] == [("GPU-b", "a"), ("GPU-a", "b")]


def test_sharing_is_exclusive_unless_it_is_enabled():
    ratio = "compute_mode: time_slice, memory_overcommit_ratio: 1.2"
    off, plain = (
        _declare(f"gpu_sharing: {{{keys}}}", Found(FOUND.machine, FOUND.disk, TWO_CARDS))
        for keys in ("enabled: false", "enabled: true, compute_mode: exclusive")
    )
    on = _declare(f"gpu_sharing: {{enabled: true, {ratio}}}", Found(FOUND.machine, FOUND.disk, TWO_CARDS))
    assert off.devices == plain.devices
    assert {(d.sharing, d.overcommit_milli) for d in off.devices} == {(SharingMode.EXCLUSIVE, 1000)}
    assert {(d.sharing, d.overcommit_milli) for d in on.devices} == {(SharingMode.TIME_SLICE, 1200)}


def test_simulated_devices_are_always_said_to_be_simulated_and_keep_their_ids():
    text = "simulated_gpus: [{model: Test, gpu_type: test-gpu, memory: 24GiB, count: 2}]\n"
    text += "gpu_sharing: {enabled: true, compute_mode: mps}"
    node = _declare(text)
    assert [(d.uuid, d.index, d.memory_mib, d.simulated) for d in node.devices] == [
        ("GPU-SIM-n1-0", 0, 24_576, True),
        ("GPU-SIM-n1-1", 1, 24_576, True),
    ]
    assert (node.labels["simulated"], node.labels["gpu_type"]) == ("true", "test-gpu")
    assert any("simulated" in note for note in node.notes)
    assert node == _declare(text)


def test_a_label_that_is_given_wins_over_one_that_is_derived_but_not_over_simulated():
    node = _declare("labels: {gpu_type: mine, simulated: 'false'}\nsimulated_gpus: [{}]")
    assert node.labels == {"gpu_type": "mine", "simulated": "true"}


def test_an_empty_gpu_pool_tells_its_cause():
    found = Found(FOUND.machine, FOUND.disk, Discovery(note="no permission on the NVIDIA device files"))
    node = _declare("resource_pools: [{name: g, type: gpu}]", found)
    assert node.devices == ()
    assert any("pool g is empty: no permission" in note for note in node.notes)


def test_a_device_of_unknown_memory_is_given_out_whole_and_never_shared():
    cards = Discovery((Gpu("GPU-a", 0, "NVIDIA A100", 81_920), Gpu("GPU-g", 1, "NVIDIA GB10", 0)))
    found = Found(FOUND.machine, FOUND.disk, cards)
    assert [device.memory_mib for device in _declare("gpu_sharing: {enabled: false}", found).devices] == [81_920, 0]
    sharing = "gpu_sharing: {enabled: true, compute_mode: time_slice}"
    with pytest.raises(BadConfiguration) as refused:
        _declare(sharing, found)
    assert (refused.value.fields["field"], refused.value.fields["found"]) == ("gpu_sharing.compute_mode", "'time_slice'")
    why = "exclusive, or pools whose `devices` leave it out: GPU 1 (NVIDIA GB10) does not say how much memory it has"
    assert refused.value.fields["expected"] == why
    others = _declare(f"{sharing}\nresource_pools: [{{name: g, type: gpu, devices: [0]}}]", found)
    assert [device.uuid for device in others.devices] == ["GPU-a"]


def test_mig_slices_are_devices_that_are_not_shared_further():
    cards = Discovery((Gpu("MIG-1", 0, "NVIDIA A100 MIG 2g.20gb", 20_000, mig=True, card_milli=285),))
    node = _declare("gpu_sharing: {enabled: true, compute_mode: time_slice}", Found(FOUND.machine, FOUND.disk, cards))
    assert [(d.sharing, d.gpu_type, d.card_milli) for d in node.devices] == [(SharingMode.MIG, "nvidia-a100", 285)]


@pytest.mark.parametrize(
    ("pool", "field", "expected"),
    [
        ("{type: cpu, cores: 17}", "resource_pools[0].cores", "at most 16, the cores of this machine"),
        ("{type: memory, size_gb: 69}", "resource_pools[0].size_gb", "at most 68.71 (GB of 10**9 bytes; 64 GiB), the memory"),
        ("{type: disk, path: /x, size_gb: 1001}", "resource_pools[0].size_gb", "at most 1000"),
        ("{type: gpu, devices: [0, 2]}", "resource_pools[0].devices", "indices of devices that are there: [0, 1]"),
    ],
)
def test_more_than_the_machine_has_is_refused_with_what_would_be_right(pool: str, field: str, expected: str):
    with pytest.raises(BadConfiguration) as refused:
        _declare(f"resource_pools: [{pool}]", Found(FOUND.machine, FOUND.disk, TWO_CARDS))
    assert refused.value.fields["field"] == field
    assert expected in str(refused.value.fields["expected"])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100"),
        ("NVIDIA A100 80GB PCIe", "nvidia-a100"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("NVIDIA H200", "nvidia-h200"),
        ("Tesla V100-SXM2-16GB", "nvidia-v100"),
        ("Tesla T4", "nvidia-t4"),
        ("NVIDIA L40S", "nvidia-l40s"),
        ("NVIDIA GeForce RTX 4090", "nvidia-rtx-4090"),
        ("NVIDIA GeForce GTX 1080 Ti", "nvidia-gtx-1080-ti"),
        ("NVIDIA RTX 6000 Ada Generation", "nvidia-rtx-6000-ada"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia-a100"),
    ],
)
def test_a_gpu_type_is_its_model_without_maker_form_and_memory(name: str, kind: str):
    assert gpu_type(name) == kind


def test_the_example_file_that_ships_is_read():
    text = (Path(__file__).parents[3] / "agent" / "agent.yaml").read_text()
    config = parse_yaml(text, AgentConfig, "agent.yaml")
    assert config.gpu_sharing.memory_overcommit_ratio == 1.2
