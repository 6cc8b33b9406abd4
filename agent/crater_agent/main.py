"""The command `crater-agent`: reads its file, looks at the machine, and runs the agent until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from crater_agent import cgroup, config, declare, device_files, directories, disks, logs, machine, mounts, nvml, project_quota
from crater_agent.agent import Agent
from crater_agent.config import AgentConfig
from crater_agent.cores import Cores, read_numa
from crater_agent.docker_runtime import DockerRuntime
from crater_agent.environment import Host
from crater_agent.gpu_kept import KeptFaults
from crater_agent.gpu_watch import GpuWatch
from crater_agent.link import Link
from crater_agent.metrics import Metrics
from crater_agent.mps_control import Owner
from crater_agent.mps_daemons import MpsDaemons
from crater_agent.node_watch import NodeWatch
from crater_agent.records import Records
from crater_agent.runtime import Identity, Place, ProcessRuntime, identity_of
from crater_agent.runtimes import Runtimes
from crater_agent.server import Server
from crater_agent.session import Session
from crater_agent.spawner import Spawner
from crater_agent.watch import Watcher
from crater_agent.workload import Workload
from crater_core import __version__
from crater_core.clock import SystemClock
from crater_core.configuration import bad_value
from crater_core.errors import BadConfiguration, CraterError
from crater_core.model.node import Enforcement, SharingMode
from crater_core.wire.agents import NodeDeclaration

log = logging.getLogger("crater.agent")
STOP_PATIENCE_S = 15.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def main() -> None:
    if sys.argv[1:2] == ["doctor"]:
        from crater_agent import doctor

        sys.exit(doctor.main(sys.argv[2:]))
    if sys.argv[1:2] == ["drain"]:
        from crater_agent import drain

        sys.exit(drain.main(sys.argv[2:]))
    arguments = _parser().parse_args()
    try:
        sys.exit(_run(arguments))
    except BadConfiguration as error:
        sys.stderr.write(f"crater-agent: {error.message}\n")
        sys.exit(2)
    except CraterError as error:
        sys.stderr.write(f"crater-agent: {error.message}\n")
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="crater-agent",
        description="Offers this machine to a Crater scheduler and runs what it is given. "
        "SIGTERM and SIGINT stop the agent; its workloads go on and are taken over by the next start. "
        "`crater-agent drain` empties the node first; `crater-agent doctor` checks it.",
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="agent.yaml")
    parser.add_argument("--check", action="store_true", help="check the file against this machine, say what is offered, end")
    parser.add_argument(
        "--stop-workloads-on-exit", action="store_true", help="end all workloads, too, when the agent is stopped by a signal"
    )
    parser.add_argument("--version", action="version", version=f"crater-agent {__version__}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    file: Path = arguments.config
    settings = config.load(file)
    token = config.token_of(settings, os.environ, file.name)
    identity = _identity(settings, file.name)
    logs.set_up_logging(settings.log)
    gpus = nvml.Nvml()
    found = declare.Found(
        machine.discover(cgroup.memory_limit_bytes()), machine.disk(declare.disk_path(settings)), gpus.discover()
    )
    declaration = declare.declare(settings, found, file.name)
    if arguments.check:
        sys.stdout.write(declaration.model_dump_json(indent=2, exclude={"agent_secret"}) + "\n")
        return 0
    data_dir = directories.make_directories(settings, file.name, shared=identity is not None)
    lock = directories.only_one(data_dir)
    cgroups, why = None, "cgroups are off in the configuration"
    if settings.cgroups == "auto":
        cgroups, why = cgroup.open_cgroups(directories.group_name(settings.node_name, data_dir), cores=settings.exclusive_cores)
    place = _place(settings, found, identity, file.name)
    declaration = _with_enforcement(declaration, cgroups, why, bool(place.gpu_files), settings.exclusive_cores)
    declaration = _with_reach(declaration, settings)
    for note in declaration.notes:
        log.warning("%s", note)
    stop_workloads = arguments.stop_workloads_on_exit or settings.stop_workloads_on_exit
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(_serve(settings, token, place, declaration, cgroups, gpus, found.gpus, stop_workloads))
    finally:
        gpus.close()
        if cgroups is not None:
            cgroups.close()
        os.close(lock)
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


def _identity(settings: AgentConfig, file: str) -> Identity | None:
    if settings.run_as is None:
        return None
    try:
        identity = identity_of(settings.run_as)
    except KeyError:
        raise bad_value(file, "run_as", settings.run_as, "a user of this machine") from None
    if os.geteuid() != 0 and identity.uid != os.geteuid():
        raise bad_value(file, "run_as", settings.run_as, "no other user: only an agent that runs as root can change to one")
    return identity if os.geteuid() == 0 else None


def _place(settings: AgentConfig, found: declare.Found, identity: Identity | None, file: str) -> Place:
    home = identity.home if identity is not None else str(Path.home())
    python_dir = os.path.dirname(sys.executable)  # noqa: PTH120
    host = Host(
        settings.node_name, python_dir, home, os.environ.get("TZ", ""), settings.env_profiles, directories.mps_root(settings)
    )
    everybodys = list(device_files.EVERYBODYS)
    for number, path in enumerate(settings.device_files):
        try:
            everybodys.append(device_files.of_path(path))
        except (OSError, ValueError) as error:
            raise bad_value(file, f"device_files[{number}]", str(path), f"a device file of this machine ({error})") from None
    gpu_files = {gpu.uuid: device_files.of_nvidia(gpu.minor, gpu.mig_places) for gpu in found.gpus.gpus}
    scratch_root = directories.scratch_root(settings)
    boot_id = found.machine.boot_id
    no_disk_limit, disk_quota = _disk_limits(settings, scratch_root, file)
    gpu_numa = {gpu.uuid: gpu.numa_node for gpu in found.gpus.gpus if gpu.numa_node is not None}
    return Place(
        host,
        scratch_root,
        boot_id,
        settings.mount_roots,
        identity,
        tuple(everybodys),
        gpu_files,
        no_disk_limit,
        settings.scratch.keep_failed,
        disk_quota,
        mounts.why_none(),
        gpu_numa,
        settings.scheduler_endpoint[0],
    )


def _disk_limits(settings: AgentConfig, scratch_root: Path, file: str) -> tuple[str, bool]:
    """Why sizes of scratch space are not held, and whether it is a quota that holds them. Raises BadConfiguration."""
    wanted = settings.scratch.hard_limit
    if wanted == "off":
        return "scratch.hard_limit is off", False
    no_images = disks.why_none()
    if wanted == "auto" and not no_images:
        return "", False
    no_quota = project_quota.why_none(scratch_root)
    if wanted == "quota" and no_quota:
        raise bad_value(file, "scratch.hard_limit", wanted, f"auto: {no_quota}")
    return (no_images, False) if no_quota else ("", True)


def _cores(settings: AgentConfig, cgroups: cgroup.Cgroups | None) -> Cores | None:
    possible = settings.exclusive_cores and cgroups is not None and not cgroups.no_cores
    return Cores(sorted(os.sched_getaffinity(0)), read_numa()) if possible else None


def _with_enforcement(
    declaration: NodeDeclaration, cgroups: cgroup.Cgroups | None, why: str, gpus: bool, exclusive_cores: bool
) -> NodeDeclaration:
    if cgroups is not None:
        log.info("limits are enforced by cgroup v%d", cgroups.version)
        notes = declaration.notes
        if exclusive_cores and cgroups.no_cores:
            notes += (f"exclusive_cores is set, but no task gets cores of its own: {cgroups.no_cores}",)
        if cgroups.no_restart:
            fix = "let it run as root, or with DelegateSubgroup=agent (systemd 254 or newer)"
            notes += (f"this agent is started again only when its tasks have ended: {cgroups.no_restart}; {fix}",)
        if gpus and cgroups.no_devices:
            notes += (f"a task can open the device files of GPUs that it was not given: {cgroups.no_devices}",)
        return declaration.model_copy(update={"enforcement": Enforcement.ENFORCED, "notes": notes})
    note = f"CPU and memory limits are watched, not enforced: {why}"
    return declaration.model_copy(update={"enforcement": Enforcement.WATCHED, "notes": (*declaration.notes, note)})


def _with_reach(declaration: NodeDeclaration, settings: AgentConfig) -> NodeDeclaration:
    away = [url for url in settings.scheduler_endpoint if (urlsplit(url).hostname or "") not in LOOPBACK]
    if settings.host not in LOOPBACK or settings.advertise_url or not away:
        return declaration
    note = f"the scheduler at {away[0]} cannot read logs: listen is {settings.listen}, which only this machine reaches"
    return declaration.model_copy(update={"notes": (*declaration.notes, note)})


async def _serve(
    settings: AgentConfig,
    token: str | None,
    place: Place,
    declaration: NodeDeclaration,
    cgroups: cgroup.Cgroups | None,
    gpus: nvml.Nvml,
    found_gpus: nvml.Discovery,
    stop_workloads: bool,
) -> None:
    data_dir, node = settings.directory, settings.node_name
    records = Records(data_dir)
    agents: list[Agent] = []
    spawner = Spawner(data_dir, lambda name, end: agents[0].on_exit(name, end), lambda: agents[0].on_spawner_lost())
    cores = _cores(settings, cgroups)
    processes = ProcessRuntime(place, records, spawner, cgroups, cores)
    docker = _docker(settings, place, records, spawner, cores, agents)
    runtimes = Runtimes(processes, *([docker] if docker else []), cores=cores)
    link = Link(settings.scheduler_endpoint, token, node)
    clock, workloads = SystemClock(), dict[str, Workload]()
    session = Session(declaration, link, processes, workloads, clock)
    watcher = Watcher(processes, runtimes, settings.logs.max_bytes)
    mps = _mps(settings, found_gpus, declaration, place, clock)
    kept = KeptFaults(settings.directory, place.boot_id)
    watch = _gpu_watch(settings, gpus, found_gpus, declaration, workloads, runtimes, records, clock, kept, mps)
    idle_ms = settings.gpu_idle_warning or None
    agent = Agent(node, session, workloads, processes, runtimes, watcher, clock, settings.logs.keep, watch, idle_ms, mps)
    agents.append(agent)
    secret = secrets.token_urlsafe(32)
    node_watch = NodeWatch(lambda: machine.sample(place.scratch_root), settings.sample_interval, clock)
    metrics = Metrics(
        node,
        __version__,
        declaration.devices,
        node_watch,
        lambda: tuple(watch.devices.values()) if watch is not None else (),
        workloads.values,
        lambda: session.round_trip_ms,
    )
    began = time.monotonic()
    server = Server(records, secret, metrics.render, lambda: _health(agent, began))
    port = await _listen(server, settings)
    address = settings.address or _address(settings)
    url_host = f"[{address}]" if ":" in address else address
    session.declaration = declare.with_edges(
        declaration, settings, address, f"http://{url_host}:{port}", secret, place.boot_id, __version__
    )
    log.info("metrics, health and logs at port %d of %s", port, settings.host)
    found = await spawner.connect()
    log.info("%s spawner, pid %d", "found the" if found else "started a", spawner.pid)
    await _open_docker(docker, settings, session)
    await agent.take_over()
    # Not before: what is not taken over yet would look like something that nobody wants.
    attending = asyncio.create_task(docker.attend()) if docker is not None else None
    measuring = asyncio.create_task(node_watch.run())
    try:
        await _until_signal(agent)
        if stop_workloads:
            log.info("ending %d workload(s)", len([w for w in agent.workloads.values() if w.running]))
            await agent.stop_all(STOP_PATIENCE_S)
            await processes.unpark()
            await spawner.quit()
    finally:
        running = [w for w in agent.workloads.values() if w.running]
        log.info("the agent stops%s", f"; {len(running)} workload(s) go on without it" if running else "")
        await agent.drain_jobs()
        measuring.cancel()
        if docker is not None and attending is not None:
            attending.cancel()
            await docker.close()
        await processes.unpark()
        await spawner.close()
        await server.close()
        await link.close()


def _gpu_watch(
    settings: AgentConfig,
    door: nvml.Nvml,
    found: nvml.Discovery,
    declaration: NodeDeclaration,
    workloads: dict[str, Workload],
    runtimes: Runtimes,
    records: Records,
    clock: SystemClock,
    kept: KeptFaults,
    mps: MpsDaemons | None,
) -> GpuWatch | None:
    """Of the devices that this node gives out; None where it has no real one."""
    gpus = _given(found, declaration)
    if not gpus:
        return None
    node, health, interval_ms = settings.node_name, settings.gpu_health, settings.sample_interval
    return GpuWatch(door, gpus, interval_ms, health, node, workloads, runtimes, records, clock, kept, mps)


def _given(found: nvml.Discovery, declaration: NodeDeclaration) -> list[nvml.Gpu]:
    given = {device.uuid for device in declaration.devices if not device.simulated}
    return [gpu for gpu in found.gpus if gpu.uuid in given]


def _mps(
    settings: AgentConfig, found: nvml.Discovery, declaration: NodeDeclaration, place: Place, clock: SystemClock
) -> MpsDaemons | None:
    """None where no real device is shared so."""
    gpus = _given(found, declaration)
    if settings.gpu_sharing.mode is not SharingMode.MPS or not gpus:
        return None
    who = place.identity
    uid, gid, groups = (who.uid, who.gid, who.groups) if who is not None else (os.geteuid(), os.getegid(), ())
    owner = Owner(Path(place.host.mps_root), settings.directory.absolute(), uid, gid, groups)
    return MpsDaemons(owner, gpus, settings.node_name, settings.gpu_health.recheck, clock)


def _docker(
    settings: AgentConfig, place: Place, records: Records, spawner: Spawner, cores: Cores | None, agents: list[Agent]
) -> DockerRuntime | None:
    """`agents` holds the agent once anything can happen."""
    if settings.docker.enabled is False:
        return None

    def offer(yes: bool) -> None:
        session = agents[0].session
        session.declare(session.declaration.model_copy(update={"runtimes": ("process", "docker") if yes else ("process",)}))

    return DockerRuntime(
        place,
        records,
        spawner,
        settings.docker,
        directories.group_name(settings.node_name, settings.directory),
        lambda allocation, raw: agents[0].on_exit(allocation, raw),
        lambda workload, reason: agents[0].on_progress(workload, reason),
        offer,
        cores,
    )


async def _open_docker(docker: DockerRuntime | None, settings: AgentConfig, session: Session) -> None:
    """Look for the engine before the node declares itself."""
    if docker is None:
        return
    facts = await docker.open()
    notes, runtimes = session.declaration.notes, ("process",)
    if facts is not None:
        notes, runtimes = (*notes, *facts.notes), ("process", "docker")
    elif settings.docker.enabled is True or settings.docker.socket.exists():
        log.warning("no containers are run: %s", docker.why_not)
        notes = (*notes, f"no containers are run: {docker.why_not}")
    session.declaration = session.declaration.model_copy(update={"runtimes": runtimes, "notes": notes})


async def _listen(server: Server, settings: AgentConfig) -> int:
    try:
        return await server.start(settings.host, settings.port)
    except OSError as error:
        raise CraterError(f"cannot listen on {settings.listen}: {error.strerror or error}") from None


async def _until_signal(agent: Agent) -> None:
    running = asyncio.create_task(agent.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _health(agent: Agent, began: float) -> dict[str, object]:
    return {
        "status": "ok",
        "node": agent.node,
        "version": __version__,
        "registered": agent.session.registered,
        "scheduler": agent.session.link.endpoint,
        "term": agent.session.heard.term,
        "running": sum(1 for workload in agent.workloads.values() if workload.running),
        "up_s": int(time.monotonic() - began),
    }


def _address(settings: AgentConfig) -> str:
    """The address this machine has on its way to the scheduler."""
    if settings.host in LOOPBACK:
        return "127.0.0.1"
    host = urlsplit(settings.scheduler_endpoint[0]).hostname or "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


if __name__ == "__main__":
    main()
