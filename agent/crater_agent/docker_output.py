"""Carries what a container writes into the same files as a process task's output: once, also over a restart of the agent."""

from __future__ import annotations

import asyncio
import calendar
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from crater_core.errors import RuntimeFailed

log = logging.getLogger("crater.agent.docker")
CHECKPOINT_S = 0.5
AGAIN_S = 0.5
Read = Callable[[int], Iterator[tuple[str, bytes]]]
"""From whole seconds since the epoch on: (time, piece) pairs; times are texts that sort as they follow each other."""


class Position:
    """Where one time's first piece begins in the file: whoever goes on from there skips what the file has beyond it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved_at = 0.0
        self.time, self.offset = "", 0
        with contextlib.suppress(OSError, ValueError):
            moment, offset = path.read_text().split()
            self.time, self.offset = moment, int(offset)

    def move(self, moment: str, offset: int) -> None:
        if moment != self.time:
            self.time, self.offset = moment, offset
        if time.monotonic() - self._saved_at > CHECKPOINT_S:
            self._saved_at = time.monotonic()
            # A record that was forgotten meanwhile needs no position any more.
            with contextlib.suppress(OSError):
                self._path.write_text(f"{self.time} {self.offset}")

    @property
    def seconds(self) -> int:
        return calendar.timegm(time.strptime(self.time[:19], "%Y-%m-%dT%H:%M:%S")) if self.time else 0


class Follower(threading.Thread):
    """One stream of one container. `lives` says whether more may come after the stream has broken off."""

    def __init__(self, name: str, read: Read, file: Path, position: Path, lives: Callable[[], bool]) -> None:
        super().__init__(name=f"output of {name}", daemon=True)
        self._read, self._file, self._position, self._lives = read, file, position, lives
        self.finished = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.given_up = threading.Event()

    def run(self) -> None:
        try:
            fd = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.error("the output of a container is lost: %s", error)
            self._finish()
            return
        try:
            while True:
                # Asked before it is read: what came before the end is then in what is read.
                lives = self._lives()
                whole = self._copy(fd)
                if (whole and not lives) or self.given_up.wait(AGAIN_S if not whole else 0.05):
                    return
        finally:
            os.close(fd)
            self._finish()

    def _finish(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self.finished.set)

    def _copy(self, fd: int) -> bool:
        """False when it broke off in the middle."""
        position = Position(self._position)
        at, size, first = position.offset, os.fstat(fd).st_size, True
        try:
            for moment, piece in self._read(position.seconds):
                if moment < position.time:
                    continue
                if first and moment != position.time:
                    # The engine has dropped what we had; all that follows is new.
                    at = size
                first = False
                position.move(moment, at)
                rest = piece[max(0, size - at) :]
                while rest:
                    rest = rest[os.write(fd, rest) :]
                at += len(piece)
                size = max(size, at)
        except RuntimeFailed as error:
            log.debug("%s: %s", self.name, error.message)
            return False
        except OSError as error:
            log.error("%s cannot be written: %s", self._file, error)
            return False
        return True
