"""Reads what workloads wrote: by offset, live, with a wait for more. And sets up the agent's own log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import dataclass

from crater_agent.config import Log
from crater_agent.records import Records, is_id
from crater_core.errors import NotFound

CHUNK_BYTES_MAX = 1024 * 1024
POLL_S = 0.05
WAIT_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class LogPart:
    content: bytes
    next_offset: int
    complete: bool
    """The workload has ended and this reaches to the end of what it wrote."""


async def read_log(records: Records, allocation: str, stream: str, offset: int, limit: int, wait_s: float) -> LogPart:
    """From `offset` on, waiting up to `wait_s` for the first byte. Raises NotFound."""
    if not is_id(allocation) or not records.log_file(allocation, stream).parent.is_dir():
        raise NotFound(f"this node has no log of {allocation[:100]!r}", allocation=allocation[:100])
    path = records.log_file(allocation, stream)
    deadline = time.monotonic() + min(max(wait_s, 0.0), WAIT_S_MAX)
    while True:
        # Ended is asked before the file is read: what was written before the end is then in the part.
        ended = not records.directory(allocation).is_dir() or (records.directory(allocation) / "final.json").exists()
        part = _read(os.fspath(path), offset, min(max(limit, 1), CHUNK_BYTES_MAX), ended)
        if part.content or part.complete or time.monotonic() >= deadline:
            return part
        await asyncio.sleep(POLL_S)


def _read(path: str, offset: int, limit: int, ended: bool) -> LogPart:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return LogPart(b"", offset, ended)
    try:
        size = os.fstat(fd).st_size
        if offset >= size:
            return LogPart(b"", offset, ended)
        # The oldest part of a long log has been dropped and is a hole: reading goes on where the data begin.
        start = _data_from(fd, offset)
        content = os.pread(fd, limit, start)
        following = start + len(content)
        return LogPart(content, following, ended and following >= size)
    finally:
        os.close(fd)


def _data_from(fd: int, offset: int) -> int:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:
        return offset


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(config: Log) -> None:
    """To standard error, and to a file where one is named."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if config.file is not None:
        config.file.expanduser().parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(config.file.expanduser()))
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    for handler in handlers:
        handler.setFormatter(_Json() if config.format == "json" else text)
    logging.basicConfig(level=config.level.upper(), handlers=handlers, force=True)
    # Their lines are one for each request, and hold URLs.
    for name in ("httpx", "httpcore", "asyncio", "docker", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)
