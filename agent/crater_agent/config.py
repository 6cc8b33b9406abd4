"""The keys of agent.yaml, with their units and defaults. What only the machine can tell is checked in `declare`."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BeforeValidator, Discriminator, Field, SecretStr, Tag, ValidationInfo, field_validator, model_validator

from crater_core.configuration import Bytes, DurationMs, Expected, Strict, bad_value, load_yaml, show
from crater_core.errors import BadConfiguration
from crater_core.model.node import SharingMode
from crater_core.model.units import GB, GIB

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_BRANCH = re.compile(r"(resource_pools\[\d+\])\.(?:gpu|cpu|memory|disk)\b")
_HOST_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\[\]]*):(?P<port>[0-9]{1,5})")
DEFAULT_POOLS = {"gpu": "gpu-pool", "cpu": "cpu-pool", "memory": "memory-pool", "disk": "disk-pool"}


def _name(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise Expected("a name of letters, digits, '.', '_' and '-', at most 63 of them")
    return value


Name = Annotated[str, BeforeValidator(_name)]


def _to_gb(value: object) -> object:
    if isinstance(value, str):
        raise Expected("a number of GB (10**9 bytes) without a unit, such as 256")
    return value


Gigabytes = Annotated[float, BeforeValidator(_to_gb), Field(ge=0, le=1_000_000_000)]


class GpuPool(Strict):
    name: Name = DEFAULT_POOLS["gpu"]
    type: Literal["gpu"]
    devices: Literal["all"] | tuple[Annotated[int, Field(ge=0, le=1023)], ...] = "all"


class CpuPool(Strict):
    name: Name = DEFAULT_POOLS["cpu"]
    type: Literal["cpu"]
    cores: float = Field(gt=0)
    reserved_cores: float = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _some_left(self) -> CpuPool:
        if self.reserved_cores >= self.cores:
            raise Expected(f"reserved_cores below cores ({self.cores:g})")
        return self


class MemoryPool(Strict):
    name: Name = DEFAULT_POOLS["memory"]
    type: Literal["memory"]
    size_gb: Gigabytes = Field(gt=0)
    reserved_gb: Gigabytes = 0

    @model_validator(mode="after")
    def _some_left(self) -> MemoryPool:
        if self.reserved_gb >= self.size_gb:
            raise Expected(f"reserved_gb below size_gb ({self.size_gb:g})")
        return self

    @property
    def size_bytes(self) -> int:
        return round(self.size_gb * GB)

    @property
    def reserved_bytes(self) -> int:
        return round(self.reserved_gb * GB)


class DiskPool(Strict):
    name: Name = DEFAULT_POOLS["disk"]
    type: Literal["disk"]
    path: Path
    size_gb: Gigabytes = Field(gt=0)

    @property
    def size_bytes(self) -> int:
        return round(self.size_gb * GB)


POOL_KINDS = {"gpu": GpuPool, "cpu": CpuPool, "memory": MemoryPool, "disk": DiskPool}


def _kind(value: object) -> str | None:
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    kind = cast("dict[str, object]", value).get("type")
    return kind if isinstance(kind, str) else None


Pool = Annotated[
    Annotated[GpuPool, Tag("gpu")]
    | Annotated[CpuPool, Tag("cpu")]
    | Annotated[MemoryPool, Tag("memory")]
    | Annotated[DiskPool, Tag("disk")],
    Discriminator(_kind),
]


class GpuSharing(Strict):
    enabled: bool = False
    compute_mode: Literal["mps", "time_slice", "exclusive"] = "time_slice"
    memory_overcommit_ratio: float = Field(default=1.0, ge=1.0, le=10.0)

    @field_validator("compute_mode")
    @classmethod
    def _is_switched_on(cls, value: str, info: ValidationInfo) -> str:
        if value != "exclusive" and info.data.get("enabled") is False:
            raise Expected("`enabled: true` beside it, or exclusive: a node that does not share its GPUs has no other mode")
        return value

    @field_validator("memory_overcommit_ratio")
    @classmethod
    def _has_an_effect(cls, value: float, info: ValidationInfo) -> float:
        if value > 1 and info.data.get("enabled") is False:
            raise Expected("`enabled: true` beside it, or 1: devices that are not shared give out no more memory than they have")
        if value > 1 and info.data.get("compute_mode") == "exclusive":
            raise Expected("1, or compute_mode time_slice or mps: an exclusive device gives out no more memory than it has")
        return value

    @property
    def mode(self) -> SharingMode:
        return SharingMode(self.compute_mode) if self.enabled else SharingMode.EXCLUSIVE

    @property
    def overcommit_milli(self) -> int:
        return round(self.memory_overcommit_ratio * 1000) if self.mode is not SharingMode.EXCLUSIVE else 1000


class GpuHealth(Strict):
    running_work: Literal["stop", "keep"] = "stop"
    """What becomes of tasks on a device that failed so badly that what they compute cannot be trusted."""
    well_for: DurationMs = 60_000
    """How long a device must have been without a fault before it is given out again."""
    recheck: DurationMs = Field(default=10_000, ge=1_000)
    """How often a device in quarantine is looked at."""
    answer_within: DurationMs = Field(default=10_000, ge=1_000)
    """A device about which NVML says nothing for so long is set aside."""
    ignore: tuple[str, ...] = ()
    """Codes of faults that are no reason for a quarantine, such as foreign, held, ecc, xid_63."""

    @field_validator("ignore")
    @classmethod
    def _are_codes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for code in value:
            if not re.fullmatch(r"foreign|held|ecc|remap_pending|remap_failed|retirement_pending|recovery|xid_[0-9]{1,4}", code):
                raise Expected(
                    "codes of faults: foreign, held, ecc, remap_pending, remap_failed, retirement_pending, recovery, xid_NUMBER"
                )
        return value


class SimulatedGpus(Strict):
    model: str = Field(default="Simulated GPU", min_length=1, max_length=200)
    gpu_type: Name = "simulated"
    memory: Bytes = 24 * GIB
    count: int = Field(default=1, ge=1, le=1024)


class Control(Strict):
    """What is kept for run workers, outside every pool."""

    slots: int = Field(default=16, ge=0, le=10_000)
    memory: Bytes | None = None


class Ports(Strict):
    first: int = Field(default=20_000, ge=1024, le=65_535)
    count: int = Field(default=1_000, ge=0, le=60_000)

    @model_validator(mode="after")
    def _inside_the_range(self) -> Ports:
        if self.first + self.count > 65_536:
            raise Expected(f"first + count at most 65536, found {self.first} + {self.count}")
        return self


class FromEnv(Strict):
    env: str


class FromFile(Strict):
    file: Path


class Credentials(Strict):
    """For one registry. The password is read when an image is pulled, and goes to the engine only."""

    username: str
    password: FromEnv | FromFile


class Docker(Strict):
    enabled: Literal["auto"] | bool = "auto"
    """auto: containers are run while an engine answers on the socket; true: its absence is a fault that is told."""
    socket: Path = Path("/var/run/docker.sock")
    network: Name = "host"
    """host, none, or a network of the engine, on which the task's ports are published."""
    pull: Literal["missing", "always", "never"] = "missing"
    pull_timeout: DurationMs = 30 * 60_000
    images: tuple[str, ...] = ()
    """Patterns of images that may be run, such as `ghcr.io/team/*`; empty: any."""
    registries: dict[str, Credentials] = Field(default_factory=dict)
    """By the registry's host as it stands in an image's name; Docker Hub is `docker.io`."""


class Log(Strict):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    file: Path | None = None


class ScratchSpace(Strict):
    hard_limit: Literal["auto", "quota", "off"] = "auto"
    """auto: a file system of the size asked for, or where this agent cannot make one a project quota, where the disk has them;
    quota: a project quota; off: the size is watched."""
    keep_failed: DurationMs = 0
    """How long the files of a task that failed are kept."""


class TaskLogs(Strict):
    keep: DurationMs = 7 * 86_400_000
    max_bytes: Bytes = GIB
    """Of each of a task's two streams; beyond it the oldest part is dropped."""


def _endpoints(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _with_known_types(value: object) -> object:
    if value is None:
        return value
    if not isinstance(value, list):
        raise Expected("a list of pools, such as `- {name: cpu-pool, type: cpu, cores: 8}`")
    for number, pool in enumerate(cast("list[object]", value)):
        if _kind(pool) not in POOL_KINDS:
            raise Expected(f"a type of gpu, cpu, memory or disk in each pool; number {number} has {show(_kind(pool))}")
    return cast("list[object]", value)


class AgentConfig(Strict):
    scheduler_endpoint: Annotated[tuple[str, ...], BeforeValidator(_endpoints)] = Field(min_length=1, max_length=16)
    token: SecretStr | None = None
    token_file: Path | None = None
    node_name: Name = Field(default_factory=socket.gethostname)
    labels: dict[str, str] = Field(default_factory=dict)
    resource_pools: Annotated[tuple[Pool, ...] | None, BeforeValidator(_with_known_types)] = None
    gpu_sharing: GpuSharing = GpuSharing()
    gpu_health: GpuHealth = GpuHealth()
    gpu_idle_warning: DurationMs = 30 * 60_000
    """A task that leaves all its GPUs unused for so long is told; 0: it is not."""
    simulated_gpus: tuple[SimulatedGpus, ...] = ()
    listen: str = "127.0.0.1:9090"
    advertise_url: str = ""
    address: str = ""
    data_dir: Path | None = None
    run_as: str | None = None
    control: Control = Control()
    ports: Ports = Ports()
    env_profiles: dict[Name, dict[str, str | FromEnv | FromFile]] = Field(default_factory=dict)
    mount_roots: tuple[Path, ...] = ()
    device_files: tuple[Path, ...] = ()
    """Such as /dev/fuse: given to every task, beside what any program may expect and the GPUs it was granted."""
    exclusive_cores: bool = False
    """True: a task that asks for whole cores gets cores that no other task runs on."""
    scratch: ScratchSpace = ScratchSpace()
    docker: Docker = Docker()
    cgroups: Literal["auto", "off"] = "auto"
    """auto: limits are enforced where this agent may make cgroups; off: they are only watched."""
    sample_interval: DurationMs = 15_000
    stop_workloads_on_exit: bool = False
    log: Log = Log()
    logs: TaskLogs = TaskLogs()

    @field_validator("scheduler_endpoint")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            if not re.fullmatch(r"https?://[^/\s]+/?", url):
                raise Expected("a URL such as http://192.168.1.100:8080, or a list of them")
        return tuple(url.rstrip("/") for url in value)

    @field_validator("listen")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        match = _HOST_PORT.fullmatch(value)
        if not match or int(match["port"]) > 65_535:
            raise Expected("HOST:PORT, such as 127.0.0.1:9090")
        return value

    @field_validator("sample_interval")
    @classmethod
    def _not_too_often(cls, value: int) -> int:
        if not 5_000 <= value <= 300_000:
            raise Expected("from 5s to 5m")
        return value

    @field_validator("resource_pools")
    @classmethod
    def _one_of_a_kind(cls, pools: tuple[Pool, ...] | None) -> tuple[Pool, ...] | None:
        seen: dict[str, str] = {}
        taken: dict[int, str] = {}
        for pool in pools or ():
            if pool.name in seen.values():
                raise Expected(f"each pool name once; {pool.name!r} stands twice")
            if not isinstance(pool, GpuPool):
                if pool.type in seen:
                    raise Expected(f"one {pool.type} pool a node; {seen[pool.type]!r} and {pool.name!r} are two")
                seen[pool.type] = pool.name
                continue
            seen[f"gpu {pool.name}"] = pool.name
            _no_device_twice(pool, taken)
        return pools

    @model_validator(mode="after")
    def _one_token(self) -> AgentConfig:
        if self.token is not None and self.token_file is not None:
            raise Expected("token or token_file, not both")
        return self

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]") or "0.0.0.0"  # noqa: S104 (":9090" means every address)

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])

    @property
    def directory(self) -> Path:
        return (self.data_dir or Path.home() / ".local/share/crater" / f"agent-{self.node_name}").expanduser()

    def pool(self, kind: type[CpuPool] | type[MemoryPool] | type[DiskPool]) -> CpuPool | MemoryPool | DiskPool | None:
        return next((pool for pool in self.resource_pools or () if isinstance(pool, kind)), None)


def _no_device_twice(pool: GpuPool, taken: dict[int, str]) -> None:
    """-1 stands for a pool of all devices, which leaves none for another."""
    devices = pool.devices if pool.devices != "all" else (-1,)
    for device in devices:
        if device in taken or (taken and -1 in (device, *taken)):
            other = taken.get(device) or next(iter(taken.values()))
            what = f"device {device}" if device >= 0 and -1 not in taken else "every device"
            raise Expected(f"each device in one pool; {what} of {pool.name!r} is also in {other!r}")
        taken[device] = pool.name


def load(path: Path) -> AgentConfig:
    """The file at `path`. Raises BadConfiguration with the field, the value found and what would be right."""
    try:
        return load_yaml(path, AgentConfig)
    except BadConfiguration as error:
        # The name of the union's branch is no key of the file.
        field = _BRANCH.sub(r"\1", str(error.fields.get("field", "")))
        raise BadConfiguration(_BRANCH.sub(r"\1", error.message), **{**error.fields, "field": field}) from None


def token_of(config: AgentConfig, environ: Mapping[str, str], file: str) -> str | None:
    """The token of the file, of `token_file` or of CRATER_TOKEN, in this order."""
    if config.token is not None:
        return config.token.get_secret_value()
    if config.token_file is not None:
        try:
            return config.token_file.expanduser().read_text("utf-8").strip()
        except OSError as error:
            raise bad_value(file, "token_file", f"{config.token_file} ({error.strerror})", "a readable file") from None
    return environ.get("CRATER_TOKEN") or None


def profile_value(source: str | FromEnv | FromFile, environ: Mapping[str, str]) -> str:
    """A value of an environment profile. Raises LookupError with a reason that does not hold the value."""
    match source:
        case FromEnv(env=name):
            if name not in environ:
                raise LookupError(f"the agent's environment has no {name}")
            return environ[name]
        case FromFile(file=path):
            try:
                return path.expanduser().read_text("utf-8").rstrip("\n")
            except OSError as error:
                raise LookupError(f"{path}: {error.strerror}") from None
        case _:
            return source
