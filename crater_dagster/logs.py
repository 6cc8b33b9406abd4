"""`CraterComputeLogManager`: output of steps on any node, live and after the end, with no shared disk: the agents have it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from dagster import Any as AnyValue
from dagster import DagsterInstance, Field, IntSource, Permissive, StringSource

from crater_core.client import CraterClient
from crater_core.errors import BadConfiguration, CraterError, NotFound
from crater_core.model.units import parse_bytes
from crater_dagster._dagster import (
    CapturedLogContext,
    CapturedLogData,
    CapturedLogMetadata,
    CapturedLogSubscription,
    ComputeIOType,
    ComputeLogManager,
    ConfigurableClass,
    ConfigurableClassData,
    LocalComputeLogManager,
)
from crater_dagster.config import CONNECTION_FIELDS
from crater_dagster.connect import client_of
from crater_dagster.shipping import MAX_BYTES, Copy, Shipped, Shipper, Target, day_of

KEY_PREFIX = "crater."
PART_BYTES = 1024**2
WHOLE_BYTES_MAX = 64 * 1024**2
"""Of one stream, when a caller asks for all of it."""
LOOK_EVERY_S = 0.5
SHIP_RETRY_S = 10.0
_QUICK_S = 2.0
_log = logging.getLogger("crater_dagster")
SHIP_TO_FIELDS = {
    "url": Field(StringSource, description="Any URL that fsspec knows: s3://bucket/logs, gs://..., file:///mnt/logs."),
    "options": Field(Permissive(), is_required=False, description="For fsspec. Secrets are better in its own variables."),
    "max_bytes": Field(AnyValue, is_required=False, description="Kept of the end of each stream. Default: 32MiB."),
    "keep_days": Field(IntSource, is_required=False, description="Copies of runs older than this go. Default: they stay."),
}


def key_of(task_id: str, allocation_id: str) -> str:
    return f"{KEY_PREFIX}{task_id}.{allocation_id}"


def named_in(log_key: Sequence[str]) -> tuple[str, str] | None:
    """Task and allocation whose output the key means; None for a key that is not one of ours."""
    parts = log_key[-1].split(".") if log_key else []
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "crater" and all(parts) else None


def _target(config: Mapping[str, Any] | None) -> Target | None:
    """Raises BadConfiguration that names the field."""
    if not config:
        return None
    keep_days = config.get("keep_days")
    max_bytes = parse_bytes(config.get("max_bytes", MAX_BYTES), "ship_to.max_bytes")
    if "://" not in config["url"]:
        raise BadConfiguration(
            f"ship_to.url must be a URL as s3://bucket/logs, found {config['url'][:100]!r}", field="ship_to.url"
        )
    if max_bytes < 1:
        raise BadConfiguration("ship_to.max_bytes must be above 0", field="ship_to.max_bytes")
    if keep_days is not None and keep_days < 1:
        raise BadConfiguration(f"ship_to.keep_days must be at least 1, found {keep_days}", field="ship_to.keep_days")
    return Target(config["url"], config.get("options") or {}, max_bytes, keep_days)


class CraterComputeLogManager(ComputeLogManager[DagsterInstance], ConfigurableClass):
    """Steps write to what their agent keeps anyway; readers get it from there by offset.

    What is captured outside of Crater's tasks (ticks, backfills, runs of other launchers) goes to files under `base_dir`.
    How long output stays is the agents' setting (`logs.keep`, `logs.max_bytes`).
    """

    def __init__(self, inst_data: ConfigurableClassData | None = None, **config: Any) -> None:
        self._inst_data, self._config = inst_data, config
        self._client: CraterClient | None = None
        self._local: LocalComputeLogManager | None = None
        self._target = _target(config.get("ship_to"))
        self._shipper: Shipper | None = None

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        base_dir = Field(StringSource, is_required=False, description="For what runs outside of tasks. Default: the instance's.")
        ship_to = Field(SHIP_TO_FIELDS, is_required=False, description="Also copy the output of ended tasks to this place.")
        return {**CONNECTION_FIELDS, "base_dir": base_dir, "ship_to": ship_to}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData | None, config_value: Mapping[str, Any]) -> Self:
        return cls(inst_data=inst_data, **config_value)

    @property
    def client(self) -> CraterClient:
        if self._client is None:
            self._client = client_of(self._instance, self._config, retry_for_s=_QUICK_S, timeout_s=5.0)
        return self._client

    @property
    def local(self) -> LocalComputeLogManager:
        if self._local is None:
            home = os.environ.get("DAGSTER_HOME", "") or self._instance.root_directory
            self._local = LocalComputeLogManager(self._config.get("base_dir") or str(Path(home) / "storage"))
            self._local.register_instance(self._instance)
        return self._local

    # Writing

    def build_log_key_for_run(self, run_id: str, step_key: str) -> Sequence[str]:
        task, allocation = os.environ.get("CRATER_TASK_ID"), os.environ.get("CRATER_ALLOCATION_ID")
        ours = step_key if step_key.startswith(KEY_PREFIX) else key_of(task, allocation) if task and allocation else step_key
        return [run_id, "compute_logs", ours]

    @contextlib.contextmanager
    def capture_logs(self, log_key: Sequence[str]) -> Generator[CapturedLogContext, None, None]:
        if named_in(log_key) is None:
            with self.local.capture_logs(log_key) as context:
                yield context
            return
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A file would be written in blocks, and nobody could read along.
                stream.reconfigure(line_buffering=True)
        yield CapturedLogContext(log_key)
        sys.stdout.flush()
        sys.stderr.flush()

    @contextlib.contextmanager
    def open_log_stream(self, log_key: Sequence[str], io_type: ComputeIOType) -> Iterator[IO[bytes] | None]:
        with self.local.open_log_stream(log_key, io_type) as stream:
            yield stream

    # Reading

    def is_capture_complete(self, log_key: Sequence[str]) -> bool:
        named = named_in(log_key)
        if named is None:
            return self.local.is_capture_complete(log_key)
        try:
            view = self.client.task(named[0])
        except NotFound:
            return True
        except CraterError:
            return False
        return view.ended or view.allocation != named[1]

    def get_log_data_for_type(
        self, log_key: Sequence[str], io_type: ComputeIOType, offset: int, max_bytes: int | None
    ) -> tuple[bytes | None, int]:
        named = named_in(log_key)
        if named is None:
            return self.local.get_log_data_for_type(log_key, io_type, offset, max_bytes)
        found, left = bytearray(), WHOLE_BYTES_MAX if max_bytes is None else max_bytes
        try:
            while left > 0:
                chunk = self.client.logs(named[0], io_type.value, offset=offset, limit=min(left, PART_BYTES), allocation=named[1])
                found += chunk.data
                left -= len(chunk.data)
                offset = chunk.next_offset
                if not chunk.data or chunk.complete:
                    break
        except CraterError:
            # The node has it no more, or cannot be asked; without a copy it is read the next time, from the same offset.
            if not found:
                return self._read_copy(log_key, io_type, offset, left)
        return bytes(found) or None, offset

    def _read_copy(self, log_key: Sequence[str], io_type: ComputeIOType, offset: int, max_bytes: int) -> tuple[bytes | None, int]:
        folder = self._folder(log_key)
        if folder is None or self._target is None:
            return None, offset
        try:
            content, offset = Shipped(self._target).read(folder, io_type.value, offset, max_bytes)
        except Exception as error:  # Whatever a file system says; the page then shows no output, as it would without a copy.
            _log.warning("the copy of %s cannot be read: %s", folder, self._target.scrubbed(str(error)))
            return None, offset
        return content or None, offset

    # Copies

    @property
    def shipper(self) -> Shipper | None:
        """Copies output to the place that is configured, if one is."""
        if self._shipper is None and self._target is not None:
            self._shipper = Shipper(self._target, lambda: client_of(self._instance, self._config, retry_for_s=SHIP_RETRY_S))
        return self._shipper

    def ship(self, run_id: str, step_key: str | None, task: str, allocation: str | None) -> None:
        """Have the output of an attempt that has ended copied, in the background; without `allocation` that of the task's
        last attempt, once it has ended. Without a configured place: nothing."""
        created_s = self._created_s(run_id) if self._target is not None else None
        if self.shipper is not None and created_s is not None:
            self.shipper.put(Copy(step_key, day_of(created_s), run_id, task, allocation))

    def _folder(self, log_key: Sequence[str]) -> str | None:
        named, run_id = named_in(log_key), log_key[0]
        created_s = self._created_s(run_id)
        if self._target is None or named is None or created_s is None:
            return None
        with contextlib.suppress(CraterError):
            return self._target.folder(day_of(created_s), run_id, *named)
        return None

    def _created_s(self, run_id: str) -> float | None:
        record = self._instance.get_run_record_by_id(run_id)
        return record.create_timestamp.timestamp() if record is not None else None

    def get_log_metadata(self, log_key: Sequence[str]) -> CapturedLogMetadata:
        named = named_in(log_key)
        if named is None:
            return self.local.get_log_metadata(log_key)
        where, folder = f"crater logs {named[0]}", self._folder(log_key)
        stdout, stderr = where, f"{where} --stream stderr"
        if folder is not None and self._target is not None:
            copy = f"{self._target.shown.rstrip('/')}/{folder}"
            stdout, stderr = f"{stdout}, or {copy}/stdout.*", f"{stderr}, or {copy}/stderr.*"
        return CapturedLogMetadata(stdout_location=stdout, stderr_location=stderr)

    def get_log_keys_for_log_key_prefix(self, log_key_prefix: Sequence[str], io_type: ComputeIOType) -> Sequence[list[str]]:
        return self.local.get_log_keys_for_log_key_prefix(log_key_prefix, io_type)

    def delete_logs(self, log_key: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
        """Output on the nodes goes when its time is over; a copy of it goes now."""
        if log_key is None or named_in(log_key) is None:
            self.local.delete_logs(log_key, prefix)
            return
        folder = self._folder(log_key)
        if folder is not None and self._target is not None:
            Shipped(self._target).remove(folder)

    def subscribe(self, log_key: Sequence[str], cursor: str | None = None) -> CapturedLogSubscription:
        return _Following(self, log_key, cursor) if named_in(log_key) else self.local.subscribe(log_key, cursor)

    def unsubscribe(self, subscription: CapturedLogSubscription) -> None:
        if isinstance(subscription, _Following):
            subscription.stop()
        else:
            self.local.unsubscribe(subscription)

    def dispose(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._local is not None:
            self._local.dispose()


class _Following(CapturedLogSubscription):
    """A reader that is told what is new, and of the end, by a thread of its own."""

    def __init__(self, manager: CraterComputeLogManager, log_key: Sequence[str], cursor: str | None) -> None:
        super().__init__(manager, log_key, cursor)
        self._stopped = threading.Event()

    def __call__(self, observer: Callable[[CapturedLogData], None] | None) -> Self:
        self._observer = observer
        self.fetch()
        threading.Thread(target=self._follow, name="crater-logs", daemon=True).start()
        return self

    def stop(self) -> None:
        self._stopped.set()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            ended = self._manager.is_capture_complete(self._log_key)
            self.fetch()
            if ended:
                # Said with a last, perhaps empty, piece: the reader waits for one.
                self.complete()
                observer = self._observer
                if observer is not None:
                    observer(CapturedLogData(self._log_key, cursor=self._cursor))
                return
            self._stopped.wait(LOOK_EVERY_S)
