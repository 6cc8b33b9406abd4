"""`CraterComputeLogManager`: output of steps on any node, live and after the end, with no shared disk: the agents have it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from dagster import DagsterInstance, Field, StringSource

from crater_core.client import CraterClient
from crater_core.errors import CraterError, NotFound
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

KEY_PREFIX = "crater."
PART_BYTES = 1024**2
WHOLE_BYTES_MAX = 64 * 1024**2
"""Of one stream, when a caller asks for all of it."""
LOOK_EVERY_S = 0.5
_QUICK_S = 2.0


def key_of(task_id: str, allocation_id: str) -> str:
    return f"{KEY_PREFIX}{task_id}.{allocation_id}"


def named_in(log_key: Sequence[str]) -> tuple[str, str] | None:
    """Task and allocation whose output the key means; None for a key that is not one of ours."""
    parts = log_key[-1].split(".") if log_key else []
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "crater" and all(parts) else None


class CraterComputeLogManager(ComputeLogManager[DagsterInstance], ConfigurableClass):
    """Steps write to what their agent keeps anyway; readers get it from there by offset.

    What is captured outside of Crater's tasks (ticks, backfills, runs of other launchers) goes to files under `base_dir`.
    How long output stays is the agents' setting (`logs.keep`, `logs.max_bytes`).
    """

    def __init__(self, inst_data: ConfigurableClassData | None = None, **config: Any) -> None:
        self._inst_data, self._config = inst_data, config
        self._client: CraterClient | None = None
        self._local: LocalComputeLogManager | None = None

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> dict[str, Any]:
        base_dir = Field(StringSource, is_required=False, description="For what runs outside of tasks. Default: the instance's.")
        return {**CONNECTION_FIELDS, "base_dir": base_dir}

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
        with contextlib.suppress(CraterError):  # What cannot be read now is read the next time, from the same offset.
            while left > 0:
                chunk = self.client.logs(named[0], io_type.value, offset=offset, limit=min(left, PART_BYTES), allocation=named[1])
                found += chunk.data
                left -= len(chunk.data)
                offset = chunk.next_offset
                if not chunk.data or chunk.complete:
                    break
        return bytes(found) or None, offset

    def get_log_metadata(self, log_key: Sequence[str]) -> CapturedLogMetadata:
        named = named_in(log_key)
        if named is None:
            return self.local.get_log_metadata(log_key)
        where = f"crater logs {named[0]}"
        return CapturedLogMetadata(stdout_location=where, stderr_location=f"{where} --stream stderr")

    def get_log_keys_for_log_key_prefix(self, log_key_prefix: Sequence[str], io_type: ComputeIOType) -> Sequence[list[str]]:
        return self.local.get_log_keys_for_log_key_prefix(log_key_prefix, io_type)

    def delete_logs(self, log_key: Sequence[str] | None = None, prefix: Sequence[str] | None = None) -> None:
        """Output on the nodes goes when its time is over."""
        if log_key is None or named_in(log_key) is None:
            self.local.delete_logs(log_key, prefix)

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
