"""The spawner by itself: what it is told over its socket, in the worst order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_harness import poll_until

from crater_agent import shim


class Spawner:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", shim.__file__, str(place)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(place / shim.SOCKET))
        self.lines = self.socket.makefile("rb")

    def say(self, **message: Any) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def ask(self, **message: Any) -> dict[str, Any]:
        self.say(**message)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        assert line, f"the spawner is gone: {self.errors()}"
        return json.loads(line)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def order(self, name: str, *argv: str, **more: Any) -> dict[str, Any]:
        directory = self.place / name
        directory.mkdir()
        return {
            "op": "spawn",
            "id": name,
            "dir": str(directory),
            "program": argv[0],
            "argv": list(argv),
            "env": {"PATH": "/usr/bin:/bin"},
            "cwd": "/",
            "stdout": str(directory / "stdout"),
            "stderr": str(directory / "stderr"),
            **more,
        }

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.lines.close()
        self.socket.close()
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def spawner(place: Path) -> Iterator[Spawner]:
    running = Spawner(place)
    yield running
    running.end()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]


def test_an_order_and_the_word_of_its_parked_child_may_come_in_one_breath(spawner: Spawner, place: Path):
    door = place / "door"
    os.mkfifo(door)
    # A child that is parked here stands at the door until somebody opens it from the other side.
    spawner.say(op="park", group="g", procs_files=[str(door)])
    spawner.ask(op="hello", n=1)
    (child,) = children_of(spawner.process.pid)
    spawner.process.send_signal(signal.SIGSTOP)
    poll_until(lambda: state_of(spawner.process.pid) == "T", what="the spawner stands still")
    spawner.say(**spawner.order("a", "/bin/sh", "-c", "exit 7", group="g", n=2))
    with door.open("rb") as inside:
        assert inside.read() == b"0"
    poll_until(lambda: state_of(child) == "S", what="the child waits for its order")
    spawner.process.send_signal(signal.SIGCONT)

    answer = spawner.hear()
    assert (answer["re"], answer["pid"]) == (2, child)
    ended = spawner.hear()
    assert (ended["op"], ended["id"], ended["exit"]["code"]) == ("exit", "a", 7)
