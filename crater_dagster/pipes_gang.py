"""The output of all members of a task in one Pipes session: messages to its handler, lines to this process's own streams."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from crater_core.client import CraterClient
from crater_core.wire.tasks import TaskView
from crater_dagster.pipes_output import TaskOutput
from crater_dagster.pipes_reader import MessageLines


class GangOutput:
    """One `TaskOutput` a member. Lines of a gang say which member they are of; what a single task writes passes as it is."""

    def __init__(
        self, client: CraterClient, members: int, on_message: Callable[[dict[str, Any]], None], on_new_attempt: Callable[[], None]
    ) -> None:
        self._on_new_attempt = on_new_attempt
        self._attempt = 0
        # Dagster's handler counts who has opened and closed, so members take turns; and nothing of an attempt comes after
        # it was forgotten.
        self._deliver = threading.RLock()
        self._ends: list[Callable[[], None]] = []
        self._outputs = [self._of(client, member, members, on_message) for member in range(members)]

    def _of(self, client: CraterClient, member: int, members: int, on_message: Callable[[dict[str, Any]], None]) -> TaskOutput:
        label = f"[{member}] ".encode() if members > 1 else b""
        stdout, stderr = Lines("stdout", label), Lines("stderr", label)
        messages = MessageLines(on_message, stderr.feed)
        self._ends += [messages.end, stdout.end, stderr.end]
        sinks = {"stdout": stdout.feed, "stderr": messages.feed}
        return TaskOutput(client, sinks, messages.forget, member, self._deliver)

    def start(self) -> None:
        for output in self._outputs:
            output.start()

    def heard(self, view: TaskView) -> None:
        with self._deliver:
            if self._attempt and view.attempt > self._attempt:
                self._on_new_attempt()
            self._attempt = view.attempt
            for output in self._outputs:
                output.heard(view)

    def finish(self, timeout_s: float) -> list[str]:
        """Why the output may not be whole, if it is not."""
        problems = [problem for output in self._outputs for problem in output.finish(timeout_s)]
        for end in self._ends:
            end()
        return problems

    def close(self) -> None:
        for output in self._outputs:
            output.close()


class Lines:
    """Bytes of another program into one of this process's text streams, at once; with a label, by whole lines."""

    def __init__(self, stream: str, label: bytes = b"") -> None:
        self._stream, self._label, self._held = stream, label, b""

    def feed(self, data: bytes) -> None:
        if not self._label:
            self._write(data)
            return
        *whole, self._held = (self._held + data).split(b"\n")
        if whole:
            self._write(b"".join(self._label + line + b"\n" for line in whole))

    def end(self) -> None:
        if self._held:
            self._write(self._label + self._held + b"\n")
            self._held = b""

    def _write(self, data: bytes) -> None:
        stream = getattr(sys, self._stream)
        stream.write(data.decode("utf-8", "replace"))
        stream.flush()
