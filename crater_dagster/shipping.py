"""Copies the output of ended tasks to a place of one's own (any fsspec URL), so that it outlives the nodes' own retention.

A copy is an extra: what goes wrong here is told with its reason, and never fails a step or a run.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit, urlunsplit

from dagster import DagsterInstance, DagsterRun

from crater_core.client import CraterClient
from crater_core.client.flows import Stream
from crater_core.errors import BadConfiguration, CraterError
from crater_dagster._dagster import report_warning

STREAMS: tuple[Stream, ...] = ("stdout", "stderr")
MAX_BYTES = 32 * 1024**2
PART_BYTES = 1024**2
QUEUE_MAX = 10_000
ENDING_S = 45.0
"""How long is waited for the end of a process that is on its way out."""
_SAFE = re.compile(r"[A-Za-z0-9_-]{1,100}")
_MISSING = "fsspec is not installed: pip install 'crater-dagster[logs]'"


@dataclass(frozen=True)
class Target:
    """Where copies go: `URL/YYYY-MM-DD/RUN/TASK.ALLOCATION/STREAM.OFFSET`, by the day on which the run was made.

    `max_bytes` is kept of the end of each stream; OFFSET is where in the stream the copy begins. Days older than `keep_days`
    are removed.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict)
    max_bytes: int = MAX_BYTES
    keep_days: int | None = None

    def folder(self, day: date, run_id: str, task: str, allocation: str) -> str:
        for part in (run_id, task, allocation):
            if not _SAFE.fullmatch(part):
                raise BadConfiguration(f"{part[:100]!r} is no id that may be part of a path")
        return f"{day.isoformat()}/{run_id}/{task}.{allocation}"

    @property
    def shown(self) -> str:
        """Without user, password and query."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def scrubbed(self, text: str) -> str:
        """Of an error's text: without the secrets that URL and options may hold."""
        text = text.replace(self.url, self.shown)
        netloc = urlsplit(self.url).netloc
        secrets = [netloc.rpartition("@")[0], *netloc.rpartition("@")[0].split(":"), *_texts_in(self.options)]
        for secret in secrets:
            if len(secret) >= 4:
                text = text.replace(secret, "***")
        return text


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [text for one in value.values() for text in _texts_in(one)]
    return [value] if isinstance(value, str) else []


def day_of(created_s: float) -> date:
    return datetime.fromtimestamp(created_s, UTC).date()


def expired(names: Iterable[str], keep_days: int, today: date) -> list[str]:
    """Those folders of days that are older than `keep_days`; what has another name is not ours."""
    oldest = today - timedelta(days=keep_days)
    found: list[str] = []
    for name in names:
        try:
            day = date.fromisoformat(name)
        except ValueError:
            continue
        if day < oldest and day.isoformat() == name:
            found.append(name)
    return sorted(found)


class Shipped:
    """The files at a target. Methods raise whatever the file system raises."""

    def __init__(self, target: Target) -> None:
        try:
            import fsspec
        except ImportError:
            raise BadConfiguration(_MISSING, field="ship_to") from None
        self._target = target
        self._files, self._root = fsspec.core.url_to_fs(target.url, **target.options)
        self._root = self._root.rstrip("/")

    def write(self, folder: str, stream: str, offset: int, content: bytes) -> None:
        place = f"{self._root}/{folder}"
        self._files.makedirs(place, exist_ok=True)
        self._files.pipe_file(f"{place}/{stream}.{offset}", content)

    def read(self, folder: str, stream: str, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """From `offset` of the stream on, or from where the copy begins; and where to read on. Empty without a copy."""
        for name in self._names(folder):
            kind, _, first = name.partition(".")
            if kind == stream and first.isdecimal():
                start = max(offset, int(first))
                path = f"{self._root}/{folder}/{name}"
                if start - int(first) >= self._files.size(path):
                    return b"", offset
                content = self._files.cat_file(path, start=start - int(first), end=start - int(first) + max_bytes)
                return content, start + len(content)
        return b"", offset

    def remove_expired(self, today: date) -> list[str]:
        days = expired(self._names(""), self._target.keep_days, today) if self._target.keep_days is not None else []
        for day in days:
            self._files.rm(f"{self._root}/{day}", recursive=True)
        return days

    def remove(self, folder: str) -> None:
        if self._names(folder):
            self._files.rm(f"{self._root}/{folder}", recursive=True)

    def _names(self, folder: str) -> list[str]:
        try:
            paths = self._files.ls(f"{self._root}/{folder}".rstrip("/"), detail=False, refresh=True)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)


def end_of(client: CraterClient, task: str, allocation: str, stream: Stream, max_bytes: int) -> tuple[int, bytes]:
    """The last `max_bytes` of a stream, and where in it they begin."""
    kept, offset = bytearray(), 0
    while True:
        chunk = client.logs(task, stream, offset=offset, limit=PART_BYTES, allocation=allocation)
        if chunk.data and chunk.next_offset - len(chunk.data) != offset:
            kept.clear()  # The node has dropped what came before.
        kept += chunk.data
        del kept[: max(0, len(kept) - max_bytes)]
        if not chunk.data or chunk.complete:
            return max(chunk.next_offset, offset) - len(kept), bytes(kept)
        offset = chunk.next_offset


@dataclass(frozen=True)
class Copy:
    """One attempt's output that is to be copied."""

    step_key: str | None
    day: date
    run_id: str
    task: str
    allocation: str | None
    """None for the task's last one, which is just ending."""


# For who follows tasks, whatever log manager the instance has


def ship(instance: DagsterInstance, run_id: str, step_key: str | None, task: str, allocation: str | None) -> None:
    """Have the output of an attempt that has ended copied, where the instance's log manager has a place for it. Without
    `allocation` it is that of the task's last attempt, once it has ended."""
    manager = instance.compute_log_manager
    if isinstance(manager, Ships):
        manager.ship(run_id, step_key, task, allocation)


def tell_problems(instance: DagsterInstance, run: DagsterRun, wait_s: float = 0.0) -> None:
    """Write what could not be copied into the run's event log, having waited so long for what is being copied."""
    manager = instance.compute_log_manager
    shipper = manager.shipper if isinstance(manager, Ships) else None
    if shipper is None:
        return
    if wait_s:
        shipper.wait(wait_s)
    for step_key, problem in shipper.problems():
        report_warning(instance, run, step_key, problem)


@runtime_checkable
class Ships(Protocol):
    """A log manager that copies."""

    @property
    def shipper(self) -> Shipper | None: ...

    def ship(self, run_id: str, step_key: str | None, task: str, allocation: str | None) -> None: ...


class Shipper:
    """Copies in a thread of its own, one after the other; `problems` are told by whoever owns the run's event log."""

    def __init__(self, target: Target, client: Callable[[], CraterClient]) -> None:
        self.target, self._make_client = target, client
        self._waiting: queue.Queue[Copy] = queue.Queue(QUEUE_MAX)
        self._problems: list[tuple[str | None, str]] = []
        self._idle = threading.Condition()
        self._open = 0
        self._thread: threading.Thread | None = None

    def put(self, copy: Copy) -> None:
        try:
            self._waiting.put_nowait(copy)
        except queue.Full:
            self._problem(copy, f"{QUEUE_MAX} copies wait already")
            return
        with self._idle:
            self._open += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="crater-shipping", daemon=True)
                self._thread.start()

    def problems(self) -> list[tuple[str | None, str]]:
        """Step (or none, for the run worker's own) and sentence; each is handed out once."""
        told: list[tuple[str | None, str]] = []
        while self._problems:
            told.append(self._problems.pop(0))
        return told

    def wait(self, for_s: float) -> None:
        """Until all is copied; what is not by then is a problem."""
        until = time.monotonic() + for_s
        with self._idle:
            while self._open and (left := until - time.monotonic()) > 0:
                self._idle.wait(left)
            if self._open:
                self._problems.append(
                    (None, f"{self._open} output(s) could not be copied to {self.target.shown} within {for_s:g} s.")
                )

    def _work(self) -> None:
        while True:
            copy = self._waiting.get()
            try:
                self._copy(copy)
            except Exception as error:
                self._problem(copy, error.message if isinstance(error, CraterError) else f"{type(error).__name__}: {error}")
            finally:
                with self._idle:
                    self._open -= 1
                    self._idle.notify_all()

    def _copy(self, copy: Copy) -> None:
        shipped = Shipped(self.target)
        with self._make_client() as client:
            allocation = copy.allocation or client.wait(copy.task, ENDING_S).allocation
            if allocation is None:
                return  # It ended before it began.
            folder = self.target.folder(copy.day, copy.run_id, copy.task, allocation)
            for stream in STREAMS:
                offset, content = end_of(client, copy.task, allocation, stream, self.target.max_bytes)
                shipped.write(folder, stream, offset, content)
        if copy.step_key is None:
            shipped.remove_expired(datetime.now(UTC).date())

    def _problem(self, copy: Copy, why: str) -> None:
        what = f"of step {copy.step_key}" if copy.step_key else "of the run worker"
        sentence = f"The output {what} could not be copied to {self.target.shown}: {self.target.scrubbed(why)}"
        self._problems.append((copy.step_key, sentence[:2000]))
