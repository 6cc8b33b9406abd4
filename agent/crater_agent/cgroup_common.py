"""What both versions of cgroups have in common: limits, counters, the two protocols, and their small files."""

# ruff: noqa: PTH106, PTH123
# (Each start and each end of a task opens dozens of these files: pathlib would take longer than the kernel.)

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from crater_agent.device_files import DeviceFile

PERIOD_US = 100_000
StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_milli: int = 0
    """0: no share of its own."""
    cpu_hard: bool = True
    """False: only a weight, for what drives others and must start at once."""
    memory_bytes: int = 0
    pids_max: int = 4096
    devices: tuple[DeviceFile, ...] | None = None
    """The device files that it may open; None: not held here."""
    cores: tuple[int, ...] = ()
    """The cores that it may run on; empty: not held here."""


@dataclass(frozen=True, slots=True)
class Counters:
    cpu_ms: int = 0
    memory_bytes: int = 0
    """Now, without the page cache that the kernel can drop."""
    memory_max_bytes: int = 0
    """The highest the kernel saw, page cache included."""
    oom_kills: int = 0


class Group(Protocol):
    @property
    def procs_files(self) -> tuple[str, ...]:
        """Where a process writes "0" to join."""
        ...

    def pids(self) -> set[int]: ...

    def kill(self) -> None:
        """SIGKILL to everything in it; call again until `pids` is empty."""
        ...

    def counters(self) -> Counters: ...

    def keep_on(self, cores: Sequence[int]) -> None:
        """From now on it runs on these cores only; one that was never kept on cores is left alone."""
        ...

    def remove(self) -> bool:
        """True when it is gone; False when the kernel still holds it, then try again."""
        ...


class Cgroups(Protocol):
    version: int
    no_devices: str
    """Why device files cannot be held here; empty when they can."""
    no_cores: str
    """Why cores of its own cannot be given to a group; empty when they can."""
    no_restart: str
    """Why the agent cannot be started again by its service manager while tasks run; empty when it can."""

    def create(self, name: str, limits: Limits) -> Group: ...

    def group(self, name: str) -> Group: ...

    def names(self) -> list[str]:
        """The groups that are there."""
        ...

    def close(self) -> None:
        """Remove the agent's own level when nothing is left in it."""
        ...


def weight(cpu_milli: int) -> int:
    """The share of version 1 (1024 a core) on version 2's scale."""
    return max(1, min(10_000, 1 + (shares(cpu_milli) - 2) * 9999 // 262_142))


def shares(cpu_milli: int) -> int:
    return max(2, cpu_milli * 1024 // 1000)


def core_list(cores: Sequence[int]) -> str:
    return ",".join(map(str, sorted(cores)))


def quota_us(cpu_milli: int) -> int:
    return max(1_000, cpu_milli * PERIOD_US // 1000)


def read(path: StrPath) -> str:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def write(path: StrPath, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def lines(path: StrPath) -> list[str]:
    """All of it, however long."""
    try:
        with open(path, "rb") as file:
            return file.read().decode().split()
    except OSError:
        return []


def number(path: StrPath) -> int:
    try:
        return int(read(path))
    except (OSError, ValueError):
        return 0


def pairs(path: StrPath, *names: str) -> dict[str, int]:
    """The numbers that stand behind these names."""
    try:
        text = read(path)
    except OSError:
        return {}
    split = [line.split() for line in text.splitlines() if line.startswith(names)]
    return {words[0]: int(words[1]) for words in split if len(words) == 2 and words[1].isdigit()}


def directories(base: StrPath) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(base) if entry.is_dir())
    except OSError:
        return []


def remove(path: StrPath) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
