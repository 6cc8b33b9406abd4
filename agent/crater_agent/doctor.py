"""`crater-agent doctor`: what an operator would check by hand on a node, each with what it saw and the fix."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from crater_agent import cgroup, config, declare, disks, machine, mounts, nvml
from crater_agent.config import AgentConfig, DiskPool, GpuPool
from crater_agent.doctor_net import check_port, check_scheduler
from crater_agent.nvml import Discovery
from crater_agent.runtime import Identity, identity_of
from crater_core.errors import BadConfiguration
from crater_core.findings import Finding, tell
from crater_core.model.node import SharingMode
from crater_core.model.units import show_bytes

DEFAULT_CONFIG = Path("/etc/crater/agent.yaml")
PROBE_BYTES = 64 * 1024**2
SLOW_BYTES_A_SECOND = 50_000_000
LITTLE_SPACE_PERCENT = 5
GROUPS = "usermod -aG video,render USER, then restart the agent"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="crater-agent doctor", description="Checks this node; exit code 1 when a check fails.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE", help=f"default: {DEFAULT_CONFIG}")
    parser.add_argument("--json", action="store_true", help="a list of {check, verdict, saw, fix}")
    parser.add_argument(
        "--image", metavar="IMAGE", help="run nvidia-smi in a container of this image, to try the container toolkit"
    )
    told = parser.parse_args(arguments)
    return tell(examine(told.config, told.image), told.json, "This node")


def examine(file: Path, image: str | None = None) -> Iterator[Finding]:
    try:
        settings = config.load(file)
    except BadConfiguration as error:
        fix = (
            f"`crater doctor --config FILE`, or write {file}: docs/agent.md has every key" if not file.exists() else "correct it"
        )
        yield Finding.failed("configuration", error.message, f"{fix}; the other checks use the defaults")
        settings = AgentConfig(scheduler_endpoint=("http://127.0.0.1:8080",))
    else:
        yield Finding.passed("configuration", str(file))
    gpus = nvml.Nvml()
    found = gpus.discover()
    gpus.close()
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: _offer(settings, found, file.name),
        lambda: _user(settings),
        lambda: _driver(settings, found),
        lambda: _device_files(settings, found),
        lambda: _containers(found, image),
        lambda: _mps(settings, found),
        lambda: _cgroups(settings),
        lambda: _rights(settings),
        lambda: _disk(settings),
        lambda: check_scheduler(settings, file.name),
        lambda: check_port(settings),
    )
    for check in checks:
        yield from check()


def _offer(settings: AgentConfig, gpus: Discovery, file: str) -> Iterator[Finding]:
    found = declare.Found(machine.discover(cgroup.memory_limit_bytes()), machine.disk(declare.disk_path(settings)), gpus)
    try:
        node = declare.declare(settings, found, file)
    except BadConfiguration as error:
        yield Finding.failed("pools", error.message, "correct resource_pools, or leave it out to offer what is there")
        return
    free = node.allocatable
    saw = f"{free.cpu_milli / 1000:g} cores, {show_bytes(free.memory_bytes)} of memory, {show_bytes(free.disk_bytes)} of disk"
    yield Finding.passed("pools", f"{saw}, {len(node.devices)} GPU(s)")


def _user(settings: AgentConfig) -> Iterator[Finding]:
    if os.geteuid() != 0:
        yield Finding.passed("user of tasks", f"the agent's own, uid {os.geteuid()}")
    elif settings.run_as is None:
        saw = "tasks run as root, which can undo limits and read every file"
        yield Finding.warned("user of tasks", saw, "set run_as to a user made for tasks")
    else:
        try:
            yield Finding.passed("user of tasks", f"{settings.run_as}, uid {identity_of(settings.run_as).uid}")
        except KeyError:
            fix = f"useradd --system --create-home {settings.run_as}"
            yield Finding.failed("user of tasks", f"run_as: no user is called {settings.run_as}", fix)


def _driver(settings: AgentConfig, gpus: Discovery) -> Iterator[Finding]:
    wanted = any(isinstance(pool, GpuPool) for pool in settings.resource_pools or ()) and not settings.simulated_gpus
    if gpus.gpus:
        names = ", ".join(sorted({gpu.name for gpu in gpus.gpus}))
        saw = f"driver {gpus.driver_version}, {len(gpus.gpus)} GPU(s): {names}"
        yield (
            Finding.warned("GPU driver", f"{saw}; {gpus.note}", "look at `nvidia-smi` and `dmesg`")
            if gpus.note
            else (Finding.passed("GPU driver", saw))
        )
    elif wanted:
        fix = "install the NVIDIA driver and see that `nvidia-smi` works as the agent's user, or take the gpu pool out"
        yield Finding.failed("GPU driver", gpus.note or "no GPU", fix)
    else:
        yield Finding.passed("GPU driver", f"no GPU is asked for ({gpus.note or 'none is there'})")


def _device_files(settings: AgentConfig, gpus: Discovery, dev: Path = Path("/dev")) -> Iterator[Finding]:
    files = sorted(path for path in dev.glob("nvidia*") if not path.is_dir())
    if not files:
        if gpus.gpus:
            yield Finding.failed(
                "GPU device files", "no /dev/nvidia* is here", "`nvidia-modprobe -u -c=0`; in a container: --gpus all"
            )
        return
    who = _who(settings)
    closed = [path.name for path in files if who is not None and not _may_open(path, who)]
    name = settings.run_as or f"uid {os.geteuid()}"
    if closed:
        yield Finding.failed("GPU device files", f"{name} may not open {', '.join(closed)}", GROUPS.replace("USER", name))
    elif gpus.gpus and not (dev / "nvidia-uvm").exists():
        fix = "`nvidia-modprobe -u -c=0`, at every boot: CUDA programs fail to start without it"
        yield Finding.warned("GPU device files", "/dev/nvidia-uvm is not there", fix)
    else:
        yield Finding.passed("GPU device files", f"{name} may open {len(files)} of {len(files)}")


def _who(settings: AgentConfig) -> Identity | None:
    with contextlib.suppress(KeyError):
        if settings.run_as is not None:
            return identity_of(settings.run_as)
    return Identity(os.geteuid(), os.getegid(), tuple(os.getgroups()), "")


def _may_open(path: Path, who: Identity) -> bool:
    status = path.stat()
    if who.uid == 0:
        return True
    if status.st_uid == who.uid:
        needed = stat.S_IRUSR | stat.S_IWUSR
    elif status.st_gid in (who.gid, *who.groups):
        needed = stat.S_IRGRP | stat.S_IWGRP
    else:
        needed = stat.S_IROTH | stat.S_IWOTH
    return status.st_mode & needed == needed


def _containers(gpus: Discovery, image: str | None) -> Iterator[Finding]:
    import docker

    name = "containers"
    try:
        engine = docker.DockerClient(base_url=os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock", timeout=20)
    except Exception as error:
        saw = f"no container engine answers ({_short(error)}): tasks with an image go to other nodes"
        yield (
            Finding.warned(name, saw, "install docker.io or Docker Engine where images are to run")
            if image
            else (Finding.passed(name, saw))
        )
        return
    try:
        info = engine.info()
        yield Finding.passed(name, f"Docker {info.get('ServerVersion')}, cgroup v{info.get('CgroupVersion', '?')}")
        if gpus.gpus:
            yield _toolkit(engine, info, image)
    except Exception as error:
        yield Finding.failed(name, f"the engine does not answer as it should: {_short(error)}", "systemctl status docker")
    finally:
        engine.close()


def _toolkit(engine: object, info: dict[str, object], image: str | None) -> Finding:
    from docker.types import DeviceRequest

    name, fix = "container toolkit", "install nvidia-container-toolkit, `nvidia-ctk runtime configure`, restart docker"
    known = (
        "nvidia" in str(info.get("Runtimes", "")) or bool(list(Path("/etc/cdi").glob("nvidia*"))) or shutil.which("nvidia-ctk")
    )
    if not known:
        return Finding.failed(name, "the engine knows no nvidia runtime and there is no CDI specification", fix)
    if image is None:
        return Finding.warned(
            name, "it is installed; no container was tried", "`crater doctor --image IMAGE` with an image that is here"
        )
    request = DeviceRequest(count=-1, capabilities=[["gpu"]])
    try:
        run = getattr(engine, "containers").run  # noqa: B009 (the library has no types)
        said = run(image, ["nvidia-smi", "-L"], remove=True, device_requests=[request], network_disabled=True)
    except Exception as error:
        return Finding.failed(name, f"nvidia-smi in {image}: {_short(error)}", fix)
    return Finding.passed(name, f"a container of {image} sees: {said.decode(errors='replace').strip().splitlines()[0]}")


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[-1][:200]


def _mps(settings: AgentConfig, gpus: Discovery) -> Iterator[Finding]:
    if settings.gpu_sharing.mode is not SharingMode.MPS:
        return
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None and gpus.gpus:
        fix = "install the driver's MPS programs (nvidia-compute-utils), or set compute_mode to time_slice"
        yield Finding.failed("MPS", "compute_mode is mps, and nvidia-cuda-mps-control was not found", fix)
    else:
        yield Finding.passed("MPS", program or "compute_mode is mps, on simulated GPUs only")


def _cgroups(settings: AgentConfig) -> Iterator[Finding]:
    name = "cgroups"
    if settings.cgroups == "off":
        yield Finding.warned(name, "off in the configuration: limits are watched, not held", "cgroups: auto")
        return
    groups, why = cgroup.open_cgroups(f"crater-doctor-{os.getpid()}", cores=True)
    if groups is None:
        fix = "run the agent as a service with Delegate=yes (agent/crater-agent.service), or as root"
        yield Finding.warned(name, f"limits are watched, not held: {why}", fix)
        return
    lacks = [text for text in (groups.no_devices, groups.no_cores if settings.exclusive_cores else "") if text]
    groups.close()
    saw = f"version {groups.version}: CPU, memory and number of processes are held"
    if lacks:
        yield Finding.warned(name, f"{saw}; but {'; '.join(lacks)}", "run the agent as root, on the machine itself")
    else:
        yield Finding.passed(name, f"{saw}, and so are device files")


def _rights(settings: AgentConfig) -> Iterator[Finding]:
    no_mounts, no_disk = mounts.why_none(), disks.why_none()
    if settings.mount_roots and no_mounts:
        fix = "run the agent as root, or use mounts whose source and target are alike"
        yield Finding.warned("mounts", f"mount_roots is set, but {no_mounts}", fix)
    missing = [str(root) for root in settings.mount_roots if not root.is_dir()]
    if missing:
        yield Finding.failed("mounts", f"mount_roots: {', '.join(missing)} is not there", "make it, mount it, or take it out")
    if no_disk and settings.scratch.hard_limit == "auto":
        yield Finding.warned(
            "scratch limit", f"sizes are watched, not held: {no_disk}", "as it says, or `scratch: {hard_limit: off}`"
        )


def _disk(settings: AgentConfig) -> Iterator[Finding]:
    base = declare.disk_path(settings).expanduser()
    while not base.exists():
        base = base.parent
    space = machine.disk(base)
    saw = f"{base}: {show_bytes(space.free_bytes)} of {show_bytes(space.total_bytes)} free"
    pool = settings.pool(DiskPool)
    if space.free_bytes * 100 < space.total_bytes * LITTLE_SPACE_PERCENT:
        yield Finding.warned("disk", saw, "free some space: tasks that write will fail")
        return
    if isinstance(pool, DiskPool) and pool.size_bytes > space.free_bytes:
        saw += f"; the pool offers {show_bytes(pool.size_bytes)}"
    probe = base / f".crater-doctor-{os.getpid()}"
    try:
        speed = _write_speed(probe)
    except OSError as error:
        yield Finding.failed("disk", f"{base} cannot be written to: {error.strerror}", "give the directory to the agent's user")
        return
    finally:
        probe.unlink(missing_ok=True)
    saw += f", writes {show_bytes(speed)}/s"
    slow = speed < SLOW_BYTES_A_SECOND
    yield Finding.warned("disk", saw, "put the disk pool on a faster disk") if slow else Finding.passed("disk", saw)


def _write_speed(probe: Path) -> int:
    block = os.urandom(1024**2)
    with probe.open("wb") as file:
        began = time.monotonic()
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return int(PROBE_BYTES / max(0.001, time.monotonic() - began))
