"""Finds Pipes messages in a program's output: whole lines from chunks of any size, and a message that began in mid-line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from dagster import PipesMessageReader
from dagster_pipes import PIPES_PROTOCOL_VERSION_FIELD, PipesDefaultMessageWriter

_MARK = f'{{"{PIPES_PROTOCOL_VERSION_FIELD}"'.encode()
LINE_BYTES_MAX = 64 * 1024**2
"""A longer line is no message."""


class MessageLines:
    """Bytes in, messages and ordinary output out, each once and in order."""

    def __init__(self, on_message: Callable[[dict[str, Any]], None], on_output: Callable[[bytes], None]) -> None:
        self._on_message, self._on_output = on_message, on_output
        self._held = bytearray()

    def feed(self, data: bytes) -> None:
        self._held += data
        while (end := self._held.find(b"\n")) >= 0:
            line = bytes(self._held[: end + 1])
            del self._held[: end + 1]
            self._line(line)
        if self._held and (not self._may_become_message() or len(self._held) > LINE_BYTES_MAX):
            # A progress bar, say: nobody should wait for the end of its line.
            self._flush()

    def end(self) -> None:
        """There is no more: what is held is a line."""
        if self._held:
            self._line(bytes(self._held))
            self._held.clear()

    def forget(self) -> None:
        self._held.clear()

    def _may_become_message(self) -> bool:
        if self._held.find(_MARK) >= 0:
            return True
        return any(self._held.endswith(_MARK[:length]) for length in range(1, len(_MARK)))

    def _flush(self) -> None:
        self._on_output(bytes(self._held))
        self._held.clear()

    def _line(self, line: bytes) -> None:
        at = line.find(_MARK)
        message = _message(line[at:]) if at >= 0 else None
        if message is None:
            self._on_output(line)
            return
        if at:
            self._on_output(line[:at])
        self._on_message(message)


def _message(text: bytes) -> dict[str, Any] | None:
    try:
        message: Any = json.loads(text)
    except ValueError:
        return None
    return message if isinstance(message, dict) and "method" in message else None


class TaskOutputReader(PipesMessageReader):
    """Tells the program to write messages to stderr, which is unbuffered; the client feeds what the scheduler reads of it."""

    def __init__(self, writers: int = 1) -> None:
        self.handler: Any = None
        self._writers = writers

    @property
    def expected_writer_count(self) -> int:
        """Every member of a gang may open Pipes of its own."""
        return self._writers

    @contextlib.contextmanager
    def read_messages(self, handler: Any) -> Iterator[dict[str, Any]]:
        self.handler = handler
        yield {PipesDefaultMessageWriter.STDIO_KEY: PipesDefaultMessageWriter.STDERR}

    def no_messages_debug_text(self) -> str:
        return "Messages are read from the task's stderr: the program opens Dagster Pipes with `open_dagster_pipes()`."
