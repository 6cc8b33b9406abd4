"""What is asked of the container engine for one lease: the body of its create call. Pure: all that is looked up comes in."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from crater_agent.cgroup_common import core_list
from crater_agent.environment import Host, arguments, environment
from crater_agent.mps import shares_by_mps
from crater_agent.runtime import Identity
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import Lease

PIDS_MAX = 4096
MEMORY_BYTES_MIN = 6 * 1024**2
"""Less than this the engine refuses."""
CPU_MILLI_MIN = 10
LOG = {"Type": "local", "Config": {"max-size": "64m", "max-file": "2", "compress": "false"}}
"""The engine's own copy of what a container writes: bounded, kept until the agent has it in its own files."""
HUB = "docker.io"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine can do."""

    version: str = ""
    cpu_quota: bool = True
    """Its kernel can hold a CPU quota, not only a weight."""
    cdi_devices: frozenset[str] = frozenset()
    """What it hands out by the Container Device Interface, such as `nvidia.com/gpu=GPU-...`."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    id: str
    working_dir: str = ""
    has_command: bool = False


@dataclass(frozen=True, slots=True)
class Bind:
    """One path of the node in the container; `source` is real: no link is in it."""

    source: str
    target: str
    read_only: bool


def creation(
    lease: Lease,
    image: Image,
    facts: EngineFacts,
    *,
    env: Mapping[str, str],
    binds: Sequence[Bind],
    scratch: str,
    labels: Mapping[str, str],
    network: str = "host",
    identity: Identity | None = None,
    cores: Sequence[int] = (),
) -> dict[str, Any]:
    """`cores`: it runs on these only; empty: on any. Raises RuntimeFailed for an image that has nothing to run."""
    if not lease.command and not image.has_command:
        raise RuntimeFailed(f"the task has no command, and image {lease.image} has none of its own")
    command = arguments(lease)
    ports = [f"{port}/tcp" for port in lease.ports] if network not in ("host", "none") else []
    host: dict[str, Any] = {
        **_limits(lease, facts),
        **({"CpusetCpus": core_list(cores)} if cores else {}),
        "Init": True,
        "NetworkMode": network,
        # An MPS client shares memory with its server, which runs outside.
        **({"IpcMode": "host"} if shares_by_mps(lease) else {}),
        # Inside and outside it is the same number, so that CRATER_PORT is true in both.
        "PortBindings": {port: [{"HostPort": port.partition("/")[0]}] for port in ports},
        "Mounts": [_mount(bind) for bind in binds],
        "SecurityOpt": ["no-new-privileges"],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": LOG,
        **({"DeviceRequests": requests} if (requests := device_requests(lease, facts)) else {}),
        **({"GroupAdd": [str(group) for group in identity.groups]} if identity and identity.groups else {}),
    }
    return {
        "Image": image.id,
        # The command is a whole program with its arguments: the image's own start program does not come before it.
        **({"Entrypoint": command, "Cmd": []} if command else {}),
        "Env": [f"{name}={value}" for name, value in env.items()],
        "WorkingDir": lease.working_dir or image.working_dir or scratch,
        "Labels": dict(labels),
        "ExposedPorts": {port: {} for port in ports},
        "AttachStdin": False,
        "OpenStdin": False,
        "Tty": False,
        **({"User": f"{identity.uid}:{identity.gid}"} if identity else {}),
        "HostConfig": host,
    }


def labels_of(lease: Lease, mark: str, node: str, cluster: str) -> dict[str, str]:
    """By these an agent knows its own containers again, and everybody sees whose they are."""
    return {
        "crater.agent": mark,
        "crater.node": node,
        "crater.cluster": cluster,
        "crater.allocation": lease.allocation,
        "crater.task": lease.task,
        "crater.token": str(lease.token),
        "crater.project": lease.project,
    }


def mps_binds(lease: Lease, env: Mapping[str, str]) -> list[Bind]:
    """The directory by which an MPS client finds its daemon, at the same path."""
    return [Bind(pipe := env["CUDA_MPS_PIPE_DIRECTORY"], pipe, read_only=False)] if shares_by_mps(lease) else []


def mps_user(lease: Lease, identity: Identity | None) -> Identity | None:
    """An MPS server serves one user: where the image would choose one, its clients run as the agent's own does."""
    if identity is not None or not shares_by_mps(lease):
        return identity
    return Identity(os.geteuid(), os.getegid(), (), "")


def _limits(lease: Lease, facts: EngineFacts) -> dict[str, Any]:
    limits: dict[str, Any] = {"PidsLimit": PIDS_MAX}
    if lease.cpu_milli:
        limits["CpuShares"] = max(2, lease.cpu_milli * 1024 // 1000)
        # What drives others must start at once: run workers have a weight only.
        if not lease.control and facts.cpu_quota:
            limits["NanoCpus"] = max(CPU_MILLI_MIN, lease.cpu_milli) * 1_000_000
    if lease.memory_bytes:
        # Memory and swap together: with both alike there is no swap.
        limits["Memory"] = limits["MemorySwap"] = max(MEMORY_BYTES_MIN, lease.memory_bytes)
    if lease.shm_bytes and not shares_by_mps(lease):
        limits["ShmSize"] = lease.shm_bytes
    return limits


def device_requests(lease: Lease, facts: EngineFacts) -> list[dict[str, Any]]:
    """GPUs by UUID: by CDI where the engine lists them, else through the NVIDIA Container Toolkit's own driver."""
    uuids = [device.uuid for device in lease.devices if not device.simulated]
    if not uuids:
        return []
    names = [f"nvidia.com/gpu={uuid}" for uuid in uuids]
    if facts.cdi_devices.issuperset(names):
        return [{"Driver": "cdi", "DeviceIDs": names}]
    return [{"Driver": "nvidia", "DeviceIDs": uuids, "Capabilities": [["gpu"]]}]


def _mount(bind: Bind) -> dict[str, Any]:
    # Unlike "Binds", these are refused when the source is not there, instead of being made as root.
    return {"Type": "bind", "Source": bind.source, "Target": bind.target, "ReadOnly": bind.read_only}


def container_environment(
    lease: Lease, host: Host, scratch: str, environ: Mapping[str, str], identity: Identity | None
) -> dict[str, str]:
    """A process task's variables but for PATH and HOME, which are the image's own. Raises RuntimeFailed."""
    # A user that the image does not know has no home in it.
    base = {"LANG": "C.UTF-8", "TMPDIR": scratch, **({"HOME": scratch} if identity is not None else {})}
    # An image, or a task, that asks for `all` would get every GPU where NVIDIA's runtime is the default.
    uuids = [device.uuid for device in lease.devices if not device.simulated]
    return {**environment(lease, host, scratch, environ, base), "NVIDIA_VISIBLE_DEVICES": ",".join(uuids) or "void"}


def registry_of(image: str) -> str:
    """The registry's host in an image's name, by Docker's own rule: a first part with a dot or a colon, or `localhost`."""
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else HUB


def with_tag(image: str) -> str:
    """`name` is `name:latest`: without a tag the engine would fetch every one."""
    return image if "@" in image or ":" in PurePosixPath(image).name else f"{image}:latest"


def refuse_image(image: str, allowed: Sequence[str]) -> None:
    """Raises RuntimeFailed for an image that this node may not run."""
    full = with_tag(image)
    if allowed and not any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed for name in (image, full)):
        raise RuntimeFailed(f"image {image} is not among those that this node runs (docker.images: {', '.join(allowed)})")
