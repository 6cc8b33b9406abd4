"""What this node offers: the configuration and the machine in, the node's declaration out. Pure; refuses what is not there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from crater_agent.config import DEFAULT_POOLS, AgentConfig, CpuPool, DiskPool, GpuPool, MemoryPool
from crater_agent.machine import Disk, Machine
from crater_agent.nvml import Discovery, Gpu
from crater_core.configuration import bad_value
from crater_core.model.node import PoolKind, SharingMode
from crater_core.model.units import GIB, MIB, MILLI, show_bytes
from crater_core.wire.agents import AmountsDeclaration, DeviceDeclaration, NodeDeclaration

_MAKERS = {"nvidia", "tesla", "quadro", "geforce"}
_FORMS = re.compile(r"sxm\d?|pcie|nvl|hbm\d?e?|\d+gb|generation|gpu|laptop|mig|\d+g\.\d+gb.*")


@dataclass(frozen=True, slots=True)
class Found:
    """What the machine has, gathered at the edge."""

    machine: Machine
    disk: Disk
    """Of the disk pool's file system, or of the data directory's."""
    gpus: Discovery = Discovery()


def declare(config: AgentConfig, found: Found, file: str = "agent.yaml") -> NodeDeclaration:
    """Raises BadConfiguration for a pool that declares more than the machine has or a device that is not there."""
    notes: list[str] = []
    devices = _devices(config, found, file, notes)
    cpu, memory, disk = config.pool(CpuPool), config.pool(MemoryPool), config.pool(DiskPool)
    if config.resource_pools is None:
        cores, size, space = found.machine.cores * MILLI, found.machine.memory_bytes, found.disk.free_bytes
        pools = {DEFAULT_POOLS[kind]: PoolKind(kind) for kind in ("cpu", "memory", "disk")}
        capacity = allocatable = AmountsDeclaration(cpu_milli=cores, memory_bytes=size, disk_bytes=space)
        if devices:
            pools[DEFAULT_POOLS["gpu"]] = PoolKind.GPU
    else:
        _fits(config, found, file)
        pools = {pool.name: PoolKind(pool.type) for pool in config.resource_pools}
        capacity, allocatable = _amounts(cpu, memory, disk)
    return NodeDeclaration(
        labels=_labels(config.labels, devices, found.gpus),
        pools=pools,
        capacity=capacity,
        allocatable=allocatable,
        devices=tuple(devices),
        control_slots=config.control.slots,
        control_memory_bytes=config.control.memory or min(16 * GIB, found.machine.memory_bytes // 2),
        port_first=config.ports.first,
        port_count=config.ports.count,
        notes=tuple(notes),
    )


def _amounts(cpu: object, memory: object, disk: object) -> tuple[AmountsDeclaration, AmountsDeclaration]:
    cores = reserved_cores = size = reserved_size = space = 0
    if isinstance(cpu, CpuPool):
        cores, reserved_cores = round(cpu.cores * MILLI), round(cpu.reserved_cores * MILLI)
    if isinstance(memory, MemoryPool):
        size, reserved_size = memory.size_bytes, memory.reserved_bytes
    if isinstance(disk, DiskPool):
        space = disk.size_bytes
    capacity = AmountsDeclaration(cpu_milli=cores, memory_bytes=size, disk_bytes=space)
    free = AmountsDeclaration(cpu_milli=cores - reserved_cores, memory_bytes=size - reserved_size, disk_bytes=space)
    return capacity, free


def _fits(config: AgentConfig, found: Found, file: str) -> None:
    machine = found.machine
    for number, pool in enumerate(config.resource_pools or ()):
        where = f"resource_pools[{number}]"
        if isinstance(pool, CpuPool) and pool.cores > machine.cores:
            raise bad_value(file, f"{where}.cores", _plain(pool.cores), f"at most {machine.cores}, the cores of this machine")
        if isinstance(pool, MemoryPool) and pool.size_bytes > machine.memory_bytes:
            raise bad_value(
                file, f"{where}.size_gb", _plain(pool.size_gb), _at_most(machine.memory_bytes, "the memory of this machine")
            )
        if isinstance(pool, DiskPool) and pool.size_bytes > found.disk.total_bytes:
            what = f"the size of the file system of {pool.path}"
            raise bad_value(file, f"{where}.size_gb", _plain(pool.size_gb), _at_most(found.disk.total_bytes, what))


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _at_most(limit_bytes: int, what: str) -> str:
    # Rounded down: the number in the message must itself be accepted.
    return f"at most {limit_bytes // 10**7 / 100:g} (GB of 10**9 bytes; {show_bytes(limit_bytes)}), {what}"


def _devices(config: AgentConfig, found: Found, file: str, notes: list[str]) -> list[DeviceDeclaration]:
    every = _real_devices(config, found.gpus) + _simulated_devices(config, found.gpus)
    pools = config.resource_pools
    if (
        found.gpus.note
        and not config.simulated_gpus
        and (pools is None or every or not any(isinstance(p, GpuPool) for p in pools))
    ):
        notes.append(found.gpus.note)
    elif config.simulated_gpus:
        notes.append(f"{len(every) - len(found.gpus.gpus)} GPU(s) of this node are simulated: declared in {file}, not real")
    if config.resource_pools is None:
        _shares_have_a_size(config, every, file)
        return every
    chosen: list[DeviceDeclaration] = []
    for number, pool in enumerate(config.resource_pools):
        if isinstance(pool, GpuPool):
            chosen += _of_pool(pool, every, f"resource_pools[{number}].devices", file, found.gpus.note, notes)
    _shares_have_a_size(config, chosen, file)
    return chosen


def _of_pool(
    pool: GpuPool, every: list[DeviceDeclaration], field: str, file: str, cause: str, notes: list[str]
) -> list[DeviceDeclaration]:
    there = sorted({device.index for device in every})
    if pool.devices != "all":
        for index in pool.devices:
            if index not in there:
                right = f"indices of devices that are there: {there}" if there else f"no device, as there is none ({cause})"
                raise bad_value(file, field, index, right)
    chosen = [device for device in every if pool.devices == "all" or device.index in pool.devices]
    if not chosen:
        notes.append(f"pool {pool.name} is empty: {cause or 'its list of devices names none'}")
    return [device.model_copy(update={"pool": pool.name}) for device in chosen]


def _shares_have_a_size(config: AgentConfig, devices: list[DeviceDeclaration], file: str) -> None:
    """A share of a device that does not say how much memory it has would have no limit."""
    unknown = [
        device for device in devices if not device.memory_mib and device.sharing in (SharingMode.MPS, SharingMode.TIME_SLICE)
    ]
    if unknown:
        which = f"GPU {unknown[0].index} ({unknown[0].model})"
        right = f"exclusive, or pools whose `devices` leave it out: {which} does not say how much memory it has"
        raise bad_value(file, "gpu_sharing.compute_mode", config.gpu_sharing.compute_mode, right)


def _real_devices(config: AgentConfig, gpus: Discovery) -> list[DeviceDeclaration]:
    return [_device(config, gpu) for gpu in gpus.gpus]


def _device(config: AgentConfig, gpu: Gpu) -> DeviceDeclaration:
    sharing = config.gpu_sharing
    return DeviceDeclaration(
        uuid=gpu.uuid,
        index=gpu.index,
        model=gpu.name,
        gpu_type=gpu_type(gpu.name),
        memory_mib=gpu.memory_mib,
        pool=DEFAULT_POOLS["gpu"],
        sharing=SharingMode.MIG if gpu.mig else sharing.mode,
        overcommit_milli=MILLI if gpu.mig else sharing.overcommit_milli,
        numa_node=gpu.numa_node,
        links=gpu.links,
        compute_capability=gpu.compute_capability,
        card_milli=gpu.card_milli,
    )


def _simulated_devices(config: AgentConfig, gpus: Discovery) -> list[DeviceDeclaration]:
    first = max((gpu.index + 1 for gpu in gpus.gpus), default=0)
    kinds = [kind for kind in config.simulated_gpus for _ in range(kind.count)]
    return [
        DeviceDeclaration(
            uuid=f"GPU-SIM-{config.node_name}-{number}",
            index=first + number,
            model=kind.model,
            gpu_type=kind.gpu_type.lower(),
            memory_mib=kind.memory // MIB,
            pool=DEFAULT_POOLS["gpu"],
            sharing=config.gpu_sharing.mode,
            overcommit_milli=config.gpu_sharing.overcommit_milli,
            simulated=True,
        )
        for number, kind in enumerate(kinds)
    ]


def _labels(given: Mapping[str, str], devices: list[DeviceDeclaration], gpus: Discovery) -> dict[str, str]:
    labels: dict[str, str] = {}
    if devices:
        labels["gpu_type"] = devices[0].gpu_type
    if any(not device.simulated for device in devices):
        labels |= {name: value for name, value in (("cuda", gpus.cuda_version), ("driver", gpus.driver_version)) if value}
    labels |= given
    if any(device.simulated for device in devices):
        labels["simulated"] = "true"
    return labels


def gpu_type(name: str) -> str:
    """ "NVIDIA A100-SXM4-80GB" as "nvidia-a100", "NVIDIA GeForce RTX 4090" as "nvidia-rtx-4090"."""
    words = [word for word in re.split(r"[^a-z0-9.]+", name.lower()) if word and word not in _MAKERS]
    kept = [word for word in words if not _FORMS.fullmatch(word)]
    return "-".join(["nvidia", *(kept or words)])[:100]


def with_edges(
    declaration: NodeDeclaration, config: AgentConfig, address: str, agent_url: str, secret: str, boot_id: str, version: str
) -> NodeDeclaration:
    """The declaration with what is known only once the agent runs."""
    return declaration.model_copy(
        update={
            "address": config.address or address,
            "agent_url": config.advertise_url or agent_url,
            "agent_secret": secret,
            "boot_id": boot_id,
            "agent_version": version,
        }
    )


def disk_path(config: AgentConfig) -> Path:
    """Where scratch directories live: the disk pool's path, or the data directory."""
    pool = config.pool(DiskPool)
    return pool.path if isinstance(pool, DiskPool) else config.directory
