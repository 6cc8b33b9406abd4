"""What a workload is told: its environment, its command and its program. Nothing of the agent's own leaks into it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crater_agent.config import FromEnv, FromFile, profile_value
from crater_agent.mounts import Bind, on_node
from crater_agent.mps import client_environment, shares_by_mps
from crater_agent.proctree import MARKER
from crater_core.errors import RuntimeFailed
from crater_core.model.node import SharingMode
from crater_core.model.task import VisibleDevices
from crater_core.wire.agents import Lease

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Host:
    """What the agent itself brings to a workload's environment."""

    node: str
    python_dir: str
    home: str
    time_zone: str = ""
    profiles: Mapping[str, Mapping[str, str | FromEnv | FromFile]] = field(default_factory=lambda: {})
    mps_root: str = ""
    """Where the MPS daemons of this node are."""


def environment(
    lease: Lease,
    host: Host,
    scratch: str,
    environ: Mapping[str, str],
    base: Mapping[str, str] | None = None,
    sees_all_gpus: bool = False,
) -> dict[str, str]:
    """`environ` is the agent's own, read only for what a profile names; `base` is what everything else may overrule, by
    default for a process on this node; `sees_all_gpus`: nothing hides the node's other GPUs from the task. Raises
    RuntimeFailed with the reason."""
    env = {"PATH": f"{host.python_dir}:{SYSTEM_PATH}", "HOME": host.home, "LANG": "C.UTF-8", "TMPDIR": scratch}
    if base is not None:
        env = dict(base)
    # Otherwise what a Python program prints is seen only when its buffer is full.
    env["PYTHONUNBUFFERED"] = "1"
    if host.time_zone:
        env["TZ"] = host.time_zone
    env |= _profile(lease, host, environ)
    env |= _torch(lease)
    env |= lease.env
    env.setdefault("OMP_NUM_THREADS", str(max(1, lease.cpu_milli // 1000)))
    return env | granted(lease, host, scratch, sees_all_gpus)


def _profile(lease: Lease, host: Host, environ: Mapping[str, str]) -> dict[str, str]:
    if lease.env_profile is None:
        return {}
    if lease.env_profile not in host.profiles:
        raise RuntimeFailed(f"this node has no environment profile {lease.env_profile!r}", node=host.node)
    try:
        return {name: profile_value(source, environ) for name, source in host.profiles[lease.env_profile].items()}
    except LookupError as error:
        raise RuntimeFailed(f"environment profile {lease.env_profile!r}: {error.args[0]}", node=host.node) from None


def _torch(lease: Lease) -> dict[str, str]:
    """What `torch.distributed` (`env://`) reads in a member that is one process, and `torchrun` (PET_...) in one that starts
    several. A task may say otherwise in its own environment."""
    gang = lease.gang
    if gang is None:
        return {}
    members, member, port = str(gang.members), str(lease.member), str(gang.port)
    return {
        "MASTER_ADDR": gang.address,
        "MASTER_PORT": port,
        "WORLD_SIZE": members,
        "RANK": member,
        "NODE_RANK": member,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "PET_NNODES": members,
        "PET_NODE_RANK": member,
        "PET_NPROC_PER_NODE": str(max(1, len(lease.devices))),
        "PET_MASTER_ADDR": gang.address,
        "PET_MASTER_PORT": port,
    }


def granted(lease: Lease, host: Host, scratch: str, sees_all_gpus: bool = False) -> dict[str, str]:
    """What the agent itself tells a workload; no profile and no task can say otherwise."""
    env = {
        "CRATER_TASK_ID": lease.task,
        "CRATER_ALLOCATION_ID": lease.allocation,
        "CRATER_NODE": host.node,
        "CRATER_ATTEMPT": str(lease.attempt),
        "CRATER_MEMBER": str(lease.member),
        "CRATER_MEMBERS": str(lease.members),
        "CRATER_CPU_MILLI": str(lease.cpu_milli),
        "CRATER_MEMORY_BYTES": str(lease.memory_bytes),
        MARKER: scratch,
        **_gpus(lease, sees_all_gpus),
        **client_environment(lease, host.mps_root),
    }
    if lease.ports:
        env["CRATER_PORT"] = str(lease.ports[0])
        env["CRATER_PORTS"] = ",".join(map(str, lease.ports))
    if lease.array is not None:
        env["CRATER_ARRAY_ID"] = lease.array
        env["CRATER_ARRAY_INDEX"] = str(lease.array_index)
        env["CRATER_ARRAY_SIZE"] = str(lease.array_size)
    if lease.gang is not None:
        env["CRATER_GANG_ADDRESS"] = lease.gang.address
        env["CRATER_GANG_PORT"] = str(lease.gang.port)
    if lease.output_path is not None:
        env["CRATER_OUTPUT_PATH"] = lease.output_path
    return env


def _gpus(lease: Lease, sees_all: bool) -> dict[str, str]:
    """Nothing is visible to a task without a real GPU."""
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(visible_devices(lease, sees_all))}
    if lease.devices:
        env["CRATER_GPU_UUIDS"] = ",".join(device.uuid for device in lease.devices)
        # Of each device: the shares of one task are alike.
        if memory_mib := min(device.memory_mib for device in lease.devices):
            env["CRATER_GPU_MEMORY_MIB"] = str(memory_mib)
        env["CRATER_GPU_COMPUTE_MILLI"] = str(min(device.compute_milli * device.card_milli // 1000 for device in lease.devices))
    if any(device.simulated for device in lease.devices):
        env["CRATER_SIMULATED_GPU"] = "1"
    return env


def visible_devices(lease: Lease, sees_all: bool) -> list[str]:
    """By UUID, so that no other numbering can point at another card; or, where the task asks for it, as CUDA counts what it
    can open in the order of the PCI bus: its own devices alone, or with `sees_all` all of the node's. Raises RuntimeFailed."""
    real = [device for device in lease.devices if not device.simulated]
    if shares_by_mps(lease):
        sees_all = False  # A client sees what its daemon sees.
    if lease.gpu_visible_devices is VisibleDevices.UUID:
        return [device.uuid for device in real]
    if not sees_all:
        in_order = sorted(real, key=lambda device: (device.index, device.uuid))
        return [str(in_order.index(device)) for device in real]
    if any(device.sharing == SharingMode.MIG for device in real):
        why = "a MIG slice has no index where nothing hides the node's other GPUs: set gpu_visible_devices to uuid"
        raise RuntimeFailed(why)
    return [str(device.index) for device in real]


def arguments(lease: Lease) -> list[str]:
    """The command with `{port}` as its first port and, in an array, `{index}` as its index."""
    command = list(lease.command)
    if lease.ports:
        command = [part.replace("{port}", str(lease.ports[0])) for part in command]
    if lease.array_index is not None:
        command = [part.replace("{index}", str(lease.array_index)) for part in command]
    return command


def find_program(command: str, path: str, working_dir: str, binds: Sequence[Bind] = ()) -> str:
    """Where `command` is on the task's own PATH, as the task sees it. Raises RuntimeFailed: not found, or not to be run."""
    if "/" in command:
        places = [str(Path(working_dir, command))]
    else:
        places = [os.path.join(working_dir, directory, command) for directory in path.split(":") if directory]  # noqa: PTH118
    not_executable = ""
    for place in places:  # Strings: no start is to wait for a dozen paths to be taken apart.
        found = str(on_node(Path(place), binds)) if binds else place
        if os.path.isfile(found):  # noqa: PTH113
            if os.access(found, os.X_OK):
                return place
            not_executable = not_executable or place
    if not_executable:
        raise RuntimeFailed(f"{not_executable} is not executable")
    where = "" if "/" in command else f" on the task's PATH ({path})"
    raise RuntimeFailed(f"{command} was not found{where}")


def refuse_what_cannot_be_done(lease: Lease) -> None:
    """Raises RuntimeFailed for what only another runtime could do."""
    if lease.image is not None:
        raise RuntimeFailed("an image needs the docker runtime, which this node does not have")
    if not lease.command:
        raise RuntimeFailed("the task has no command, and this node runs no images")
