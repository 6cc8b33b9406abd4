"""What an agent keeps on disk of each allocation: the lease it took, how it began, and how it ended.

DATA_DIR/allocations/ID/record.json    before the start, so that nothing is ever started twice
                        started.json   by the spawner's child, before it becomes the program
                        exit.json      by the spawner, as soon as the first process has ended
                        final.json     by the agent, before it reports the end
DATA_DIR/ends.jsonl                    the same ends, forced to the disk many at a time
DATA_DIR/logs/ID/stdout, stderr        kept for a while after everything else is gone
"""

# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH123, PTH208
# (each task passes here several times: plain strings, since pathlib would take longer than the kernel)

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from crater_agent.forked import put, write_record
from crater_core.model.node import SharingMode
from crater_core.wire.agents import Lease, ReportBody

WATCHED_SHARING = (SharingMode.MPS.value, SharingMode.TIME_SLICE.value)
"""What a task may take of a device shared so is watched: MPS holds each process to the limit, and only watching their sum."""
JOURNAL_BYTES_MAX = 1024**2
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, slots=True)
class Granted:
    """A real GPU that it has, or has a share of."""

    uuid: str
    index: int
    compute_milli: int = 1000
    limit_mib: int = 0
    """The memory that it may use, where nothing but watching keeps it to that; 0: not watched."""
    mps: bool = False
    """It has its share as a client of the device's MPS daemon."""


@dataclass(frozen=True, slots=True)
class Record:
    """What must be known of a workload after a restart of the agent. Holds no environment, so no secret."""

    allocation: str
    task: str
    token: int
    name: str = ""
    restartable: bool = True
    grace_ms: int = 10_000
    time_limit_ms: int | None = None
    cpu_milli: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    disk_held: bool = False
    """Its scratch is a file system of that size; else its size is watched."""
    scratch: str = ""
    runtime: str = "process"
    group: str = ""
    """Its cgroup or container, in which the kernel holds its limits; empty: none, its limits are watched."""
    cores: tuple[int, ...] = ()
    """Its alone; empty: it shares."""
    ports: tuple[int, ...] = ()
    health: dict[str, Any] | None = None
    gpus: tuple[Granted, ...] = ()
    """Its real devices."""
    gpu_idle_stop_ms: int | None = None
    boot_id: str = ""
    started_ms: int = 0
    """By the machine's monotonic clock, which every process of one boot shares."""


@dataclass(slots=True)
class Kept:
    """One allocation as found on disk."""

    record: Record
    pid: int | None = None
    start_ticks: int = 0
    exit: dict[str, Any] | None = None
    final: ReportBody | None = None
    problems: list[str] = field(default_factory=lambda: [])


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


class Records:
    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "allocations"
        self.logs = data_dir / "logs"
        self._lease_file = data_dir / "lease.json"
        self._journal = data_dir / "ends.jsonl"
        for directory in (self.root, self.logs):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def directory(self, allocation: str) -> Path:
        return Path(self._folder(allocation))

    def _folder(self, allocation: str) -> str:
        assert is_id(allocation), "an id becomes a path only after it was looked at"
        return f"{self.root}/{allocation}"

    def log_file(self, allocation: str, stream: str) -> Path:
        assert is_id(allocation), "an id becomes a path only after it was looked at"
        assert stream in ("stdout", "stderr"), "the two streams of a process"
        return self.logs / allocation / stream

    def begin(self, record: Record) -> None:
        directory = self._folder(record.allocation)
        _make(directory)
        _make(f"{self.logs}/{record.allocation}")
        # Not forced to the disk: after a power cut nothing of it runs, and the scheduler knows what had begun.
        write_record(directory, "record.json", _plain(record), durably=False)

    def finish(self, reports: Sequence[ReportBody]) -> Callable[[], None]:
        """A file for each end. What it gives back writes one journal of them, forces that alone to the disk, and waits for it.

        Raises OSError, in either part.
        """
        lines = [report.model_dump_json().encode() + b"\n" for report in reports]
        for report, line in zip(reports, lines, strict=True):
            directory = self._folder(report.allocation)
            _make(directory)
            put(f"{directory}/final.json", line, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

        def force() -> None:
            fd = os.open(self._journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.fstat(fd).st_size > JOURNAL_BYTES_MAX:
                    os.sync()  # What it says of the past is in the files of each by then.
                    os.truncate(fd, 0)
                os.write(fd, b"".join(lines))
                os.fdatasync(fd)
            finally:
                os.close(fd)

        return force

    def _ends_in_journal(self) -> dict[str, ReportBody]:
        """For allocations whose own file a power cut has swallowed. A torn last line counts as not there."""
        ends: dict[str, ReportBody] = {}
        with contextlib.suppress(OSError):
            for line in self._journal.read_bytes().splitlines():
                with contextlib.suppress(ValueError):
                    report = ReportBody.model_validate_json(line)
                    ends[report.allocation] = report
        return ends

    def set_ready(self, allocation: str, ready: bool) -> None:
        """So that a replica that is taken over does not count as unready until its next probe."""
        marker = self.directory(allocation) / "ready"
        with contextlib.suppress(OSError):
            marker.touch() if ready else marker.unlink(missing_ok=True)

    def is_ready(self, allocation: str) -> bool:
        return (self.directory(allocation) / "ready").exists()

    def keep_gpu_use(self, allocation: str, busy_ms: int, peak_mib: int) -> None:
        """So that an agent that takes it over goes on counting."""
        with contextlib.suppress(OSError):
            write_record(str(self.directory(allocation)), "gpu.json", {"busy_ms": busy_ms, "peak_mib": peak_mib}, durably=False)

    def gpu_use(self, allocation: str) -> tuple[int, int]:
        """Busy time and the peak of memory, as last kept; nothing where nothing was kept."""
        raw = _read(f"{self._folder(allocation)}/gpu.json") or {}
        return int(raw.get("busy_ms", 0)), int(raw.get("peak_mib", 0))

    def forget(self, allocation: str) -> None:
        """All but the logs, and beside them how it ended: a lease that is handed out again later finds its answer there."""
        final = f"{self._folder(allocation)}/final.json"
        with contextlib.suppress(FileNotFoundError):
            os.replace(final, f"{self.logs}/{allocation}/final.json")
        _remove(f"{self.root}/{allocation}")

    def past(self, allocation: str) -> ReportBody | None:
        """How an allocation ended that has been forgotten since."""
        raw = _read(f"{self.logs}/{allocation}/final.json")
        return ReportBody.model_validate(raw) if raw is not None else None

    def read_start(self, allocation: str) -> tuple[int, int] | None:
        """Pid and start ticks of its first process, if it ever had one."""
        started = _read(f"{self._folder(allocation)}/started.json")
        return (int(started["pid"]), int(started["start_ticks"] or 0)) if started is not None else None

    def read_exit(self, allocation: str) -> dict[str, Any] | None:
        return _read(f"{self._folder(allocation)}/exit.json")

    def read_all(self) -> list[Kept]:
        ends = self._ends_in_journal()
        paths = [path for path in sorted(self.root.iterdir()) if path.is_dir() and is_id(path.name)]
        kept = [self._read_one(path, ends.get(path.name)) for path in paths]
        return [one for one in kept if one is not None]

    def _read_one(self, path: Path, journalled: ReportBody | None) -> Kept | None:
        raw = _read(path / "record.json")
        final = _read(path / "final.json")
        report = ReportBody.model_validate(final) if final is not None else journalled
        if raw is None:
            if report is None:
                # Written in part when the machine stopped: nothing was started under it.
                shutil.rmtree(path, ignore_errors=True)
                return None
            raw = {"allocation": report.allocation, "task": "", "token": report.token}
        known: dict[str, Any] = {name: value for name, value in raw.items() if name in Record.__dataclass_fields__}
        for name in ("ports", "cores"):
            known[name] = tuple(known.get(name, ()))
        known["gpus"] = tuple(Granted(**grant) for grant in known.get("gpus", ()))
        record = Record(**known)
        kept = Kept(record, exit=_read(path / "exit.json"), final=report)
        started = self.read_start(record.allocation)
        if started is not None:
            kept.pid, kept.start_ticks = started
        return kept

    def save_lease_clock(self, boot_id: str, renewed_ms: int, timeout_ms: int) -> None:
        """When the lease was last renewed, so that an agent that comes back knows how long it was away."""
        text = json.dumps({"boot_id": boot_id, "renewed_ms": renewed_ms, "timeout_ms": timeout_ms})
        new = self._lease_file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(text)
        new.replace(self._lease_file)

    def load_lease_clock(self, boot_id: str) -> tuple[int, int] | None:
        raw = _read(self._lease_file)
        if raw is None or raw.get("boot_id") != boot_id:
            return None
        return int(raw["renewed_ms"]), int(raw["timeout_ms"])

    def remove_old_logs(self, keep_ms: int) -> None:
        oldest = time.time() - keep_ms / 1000
        for path in self.logs.iterdir():
            with contextlib.suppress(OSError):
                newest = max([path.stat().st_mtime, *(file.stat().st_mtime for file in path.iterdir())])
                if newest < oldest and not (self.root / path.name).exists():
                    shutil.rmtree(path, ignore_errors=True)


def record_of(lease: Lease, scratch: str, group: str, boot_id: str, now_ms: int, runtime: str = "process") -> Record:
    return Record(
        allocation=lease.allocation,
        task=lease.task,
        token=lease.token,
        name=lease.name,
        restartable=lease.restartable,
        grace_ms=lease.grace_ms,
        time_limit_ms=lease.time_limit_ms,
        cpu_milli=lease.cpu_milli,
        memory_bytes=lease.memory_bytes,
        disk_bytes=lease.disk_bytes,
        scratch=scratch,
        group=group,
        runtime=runtime,
        ports=tuple(lease.ports),
        health=lease.health.model_dump() if lease.health else None,
        gpus=tuple(
            Granted(
                grant.uuid,
                grant.index,
                grant.compute_milli,
                grant.memory_mib if grant.sharing in WATCHED_SHARING else 0,
                grant.sharing == SharingMode.MPS,
            )
            for grant in lease.devices
            if not grant.simulated
        ),
        gpu_idle_stop_ms=lease.gpu_idle_stop_ms,
        boot_id=boot_id,
        started_ms=now_ms,
    )


def _plain(record: Record) -> dict[str, Any]:
    """As `asdict`, without a copy of all that is in it."""
    plain = {name: getattr(record, name) for name in Record.__dataclass_fields__}
    return plain | {"gpus": [asdict(grant) for grant in record.gpus]}


def _make(directory: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)


def _remove(directory: str) -> None:
    """Of plain files, as a rule; of anything else, where something went wrong."""
    try:
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)


def _read(path: str | Path) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            value: object = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
