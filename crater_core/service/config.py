"""scheduler.yaml: its keys, their defaults, and what each value must be."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from crater_core.configuration import DurationMs, Expected, Milli, Strict, bad_value, load_yaml
from crater_core.errors import BadConfiguration
from crater_core.model.snapshot import Settings
from crater_core.store.etcd_access import EtcdAccess, read_access
from crater_core.wire.nodes import QuotaBody

ROLES = ("admin", "submitter", "agent", "viewer")
SHORT_FIRST_MAX = 1_000
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]*$"


def split_address(value: str) -> tuple[str, int]:
    """Host and port of "127.0.0.1:8080" or "[::1]:8080"."""
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise Expected("an address and a port, such as 127.0.0.1:8080")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect. A name other than localhost is taken as public."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class PoolSettings(Strict):
    strategy: str = Field(min_length=1)


class QueueSettings(Strict):
    """How tasks that wait are kept in order, and when room is made for one of them."""

    passing: Literal["backfill", "free", "none"] = "backfill"
    reservations_max: int = Field(default=8, ge=0, le=1000)
    hold_after: DurationMs = 600_000
    preempt_min_run: DurationMs = 60_000
    reclaim_after: DurationMs = 0
    preemptions_max: int = Field(default=3, ge=0, le=1000)
    foretell: bool = True
    project_weights: dict[str, Milli] = Field(default={})
    fair_share_half_life: DurationMs = 7 * 86_400_000
    raise_after: DurationMs = 43_200_000
    short_first: Milli = 0


class MetricsSettings(Strict):
    enabled: bool = True
    port: int = Field(default=9090, ge=0, le=65_535)
    listen: str = "127.0.0.1"


class LogSettings(Strict):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    file: Path | None = None


class HistorySettings(Strict):
    keep_days: int = Field(default=30, ge=1, le=3650)
    tasks_max: int = Field(default=200_000, ge=1)
    usage_days: int = Field(default=400, ge=1, le=3650)


class TokenSettings(Strict):
    """`sha256` is the token's hash in hexadecimal; the token itself is never stored."""

    name: str = Field(pattern=_NAME, max_length=100)
    role: Literal["admin", "submitter", "agent", "viewer"]
    projects: tuple[str, ...] = ()
    sha256: str

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, value: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", value):
            raise Expected("64 hexadecimal digits, as `crater-scheduler token new NAME` prints them")
        return value


class EtcdSettings(Strict):
    """How the scheduler is let in by etcd, and which certificates it believes."""

    user: str | None = Field(default=None, min_length=1, max_length=255)
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class SchedulerConfig(Strict):
    """The whole file. Absent keys have the defaults shown here."""

    listen: str = "127.0.0.1:8080"
    data_dir: Path = Path("~/.local/share/crater/scheduler")
    database_url: str | None = None
    etcd_endpoints: tuple[str, ...] | None = None
    etcd_prefix: str = Field(default="/crater/", pattern=r"^/([A-Za-z0-9._-]+/)+$")
    etcd: EtcdSettings = EtcdSettings()
    advertise_url: str | None = None
    leader_lease: DurationMs = Field(default=10_000, ge=1000, le=600_000)
    scheduling_policy: str = "best_fit"
    pools: dict[str, PoolSettings] = Field(default={})
    queue: QueueSettings = QueueSettings()
    heartbeat_interval: DurationMs = Field(default=10_000, ge=100)
    heartbeat_timeout: DurationMs = Field(default=30_000, ge=300)
    node_forget_after: DurationMs = Field(default=3_600_000, ge=1000)
    metrics: MetricsSettings = MetricsSettings()
    tokens: tuple[TokenSettings, ...] = ()
    quota_policies: dict[str, QuotaBody] = Field(default={})
    log: LogSettings = LogSettings()
    attempts_max: int = Field(default=5, ge=1, le=100)
    history: HistorySettings = HistorySettings()

    @field_validator("listen")
    @classmethod
    def _an_address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("advertise_url")
    @classmethod
    def _a_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/\s]+", value):
            raise Expected("a URL without a path, such as http://scheduler-1:8080")
        return value

    @field_validator("etcd_endpoints")
    @classmethod
    def _etcd_addresses(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for endpoint in value or ():
            if not re.fullmatch(r"https?://[^/\s:]+:\d{1,5}|https?://\[[0-9a-fA-F:]+\]:\d{1,5}", endpoint):
                raise Expected("addresses such as http://10.0.0.1:2379")
        if value == ():
            raise Expected("at least one address, or no such key")
        return value

    @field_validator("database_url")
    @classmethod
    def _a_database(cls, value: str | None) -> str | None:
        if value is None or value.startswith(("postgresql://", "postgres://")):
            return value
        if not value.startswith("sqlite:///") or value == "sqlite:///":
            raise Expected(
                "sqlite:///PATH (four slashes for an absolute path), postgresql://USER@HOST/NAME, or nothing for data_dir"
            )
        return value

    @property
    def address(self) -> tuple[str, int]:
        return split_address(self.listen)

    @property
    def is_shared(self) -> bool:
        """Whether the store may have other schedulers, of which one leads."""
        return not self.store_url.startswith("sqlite:")

    @property
    def store_url(self) -> str:
        """Where the state lives, as `open_store` takes it."""
        if self.etcd_endpoints:
            return f"etcd+{','.join(self.etcd_endpoints)}#{self.etcd_prefix}"
        if self.database_url and not self.database_url.startswith("sqlite:"):
            return self.database_url
        path = Path(self.database_url.removeprefix("sqlite:///")) if self.database_url else self.data_dir / "crater.db"
        return f"sqlite:///{path.expanduser()}"

    def etcd_access(self) -> EtcdAccess | None:
        """None where the file has nothing about it: the environment may. Raises BadConfiguration."""
        etcd = self.etcd
        files = (etcd.password_file, etcd.ca_file, etcd.cert_file, etcd.key_file)
        return None if etcd == EtcdSettings() else read_access(os.environ, etcd.user, *files)

    def settings(self) -> Settings:
        """The part that decisions depend on."""
        return Settings(
            strategy=self.scheduling_policy,
            pool_strategies={name: pool.strategy for name, pool in self.pools.items()},
            heartbeat_timeout_ms=self.heartbeat_timeout,
            attempts_max=self.attempts_max,
            passing=self.queue.passing,
            reservations_max=self.queue.reservations_max,
            hold_after_ms=self.queue.hold_after,
            preempt_min_run_ms=self.queue.preempt_min_run,
            reclaim_after_ms=self.queue.reclaim_after,
            preemptions_max=self.queue.preemptions_max,
            foretell=self.queue.foretell,
            project_weights=dict(self.queue.project_weights),
            fair_share_half_life_ms=self.queue.fair_share_half_life,
            raise_after_ms=self.queue.raise_after,
            short_first_milli=self.queue.short_first,
        )


def load_config(path: Path | None, listen: str | None = None, strategies: tuple[str, ...] = ()) -> SchedulerConfig:
    """The file (or the defaults), with `listen` from the command line, checked as a whole. Raises BadConfiguration."""
    config = load_yaml(path, SchedulerConfig) if path else SchedulerConfig()
    file = path.name if path else "defaults"
    if listen is not None:
        try:
            split_address(listen)
        except Expected as error:
            raise bad_value("command line", "--listen", listen, str(error)) from None
        config = config.model_copy(update={"listen": listen})
    _check(config, file, strategies)
    return config


def _check(config: SchedulerConfig, file: str, strategies: tuple[str, ...]) -> None:
    if config.heartbeat_timeout < 2 * config.heartbeat_interval:
        expected = f"at least twice heartbeat_interval ({config.heartbeat_interval} ms), so that one lost message costs no node"
        raise bad_value(file, "heartbeat_timeout", f"{config.heartbeat_timeout} ms", expected)
    if config.etcd_endpoints and config.database_url:
        raise bad_value(file, "etcd_endpoints", ", ".join(config.etcd_endpoints), "either etcd_endpoints or database_url")
    if config.etcd != EtcdSettings() and not config.etcd_endpoints:
        raise bad_value(file, "etcd", "no etcd_endpoints beside it", "etcd_endpoints: this is about them")
    certificates = config.etcd.ca_file or config.etcd.cert_file or config.etcd.key_file
    for endpoint in config.etcd_endpoints or ():
        if certificates and not endpoint.startswith("https://"):
            raise bad_value(file, "etcd_endpoints", endpoint, "https://, as certificates are named under `etcd`")
    used = {"scheduling_policy": config.scheduling_policy}
    used |= {f"pools.{name}.strategy": pool.strategy for name, pool in config.pools.items()}
    for field, strategy in used.items():
        if strategies and strategy not in strategies:
            raise bad_value(file, field, strategy, f"one of: {', '.join(sorted(strategies))}")
    for name, weight in config.queue.project_weights.items():
        if weight <= 0:
            raise bad_value(file, f"queue.project_weights.{name}", weight / 1000, "a weight above 0")
    if not 0 <= config.queue.short_first <= SHORT_FIRST_MAX * 1000:
        expected = f"a number from 0 to {SHORT_FIRST_MAX}"
        raise bad_value(file, "queue.short_first", config.queue.short_first / 1000, expected)
    names = [token.name for token in config.tokens]
    for name in names:
        if names.count(name) > 1:
            raise bad_value(file, "tokens", name, "each name once")
    host, _ = config.address
    if not is_loopback(host) and not config.tokens:
        raise _open_door(file, "listen", config.listen)


def _open_door(file: str, field: str, found: str) -> BadConfiguration:
    expected = (
        "a loopback address, or tokens beside it: anybody who reaches this port could run programs on every node. "
        "Make one with `crater-scheduler token new NAME --role admin` and put what it prints under `tokens:`"
    )
    return bad_value(file, field, found, expected)
