"""Starts the demo's processes, each in a session of its own, and sees to it that none is left when the demo ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TAIL_BYTES = 16_384


class DemoFailed(Exception):
    """Something the demo needs did not work. The message says what, and what was last written about it."""


class Interrupted(BaseException):
    """Ctrl-C, or a request to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises Interrupted; later ones are ignored, so that nothing cuts the cleaning short."""

    def interrupt(number: int, _frame: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Running:
    """A process of the demo, and the file that has its output."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    grace_s: float = 10.0
    wave: int = 0
    """Processes of a higher wave end first, those of one wave together."""

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def ask_to_end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def ended_in_time(self) -> bool:
        """Wait for its end for the grace; then kill what is left of its session. False when it had not ended by itself."""
        in_time = True
        try:
            self.process.wait(self.grace_s)
        except subprocess.TimeoutExpired:
            in_time = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return in_time


@dataclass
class Processes:
    """What the demo has started, in order."""

    home: Path
    environment: Mapping[str, str]
    running: list[Running] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str], *, grace_s: float = 10.0, wave: int = 0) -> Running:
        log = self.home / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                cwd=self.home,
                start_new_session=True,
                preexec_fn=_end_with_the_demo,
            )
        self.running.append(Running(name, process, log, grace_s, wave))
        return self.running[-1]

    def wait_until(self, name: str, ready: Callable[[], bool], timeout_s: float) -> None:
        """Raises DemoFailed when it does not come true in time, or when any process ends meanwhile."""
        until = time.monotonic() + timeout_s
        while not ready():
            self.must_all_run()
            if time.monotonic() > until:
                raise DemoFailed(f"{name} was not ready within {timeout_s:.0f} s.{self._tails()}")
            time.sleep(0.05)

    def must_all_run(self) -> None:
        for one in self.running:
            if one.ended:
                raise DemoFailed(f"{one.name} ended with exit code {one.process.returncode}. Its last words:\n{tail(one.log)}")

    def _tails(self) -> str:
        return "".join(f"\n--- {one.name} ---\n{tail(one.log, 8)}" for one in self.running)

    def stop_all(self) -> list[str]:
        """End everything, newest first; names what had to be killed. Nothing of the demo's home runs afterwards."""
        killed: list[str] = []
        for wave in sorted({one.wave for one in self.running}, reverse=True):
            together = [one for one in self.running if one.wave == wave]
            for one in together:
                one.ask_to_end()
            killed += [one.name for one in together if not one.ended_in_time()]
        self.running.clear()
        stop_leftovers(self.home)
        return killed


def _end_with_the_demo() -> None:
    """In the child: SIGTERM when the demo dies without a word, and no signal ignored because a shell's background job was."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def leftovers(home: Path) -> dict[int, str]:
    """Processes, by pid, that were started for this home: it stands in their command or their environment."""
    mark = os.fsencode(str(home))
    mine = {os.getpid(), os.getppid()}
    found: dict[int, str] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal() or int(directory.name) in mine:
            continue
        try:
            command, environment = (directory / "cmdline").read_bytes(), (directory / "environ").read_bytes()
        except OSError:
            continue
        if _names(environment, mark) or _is_ours(command, mark):
            name = (directory / "comm").read_text().strip() if directory.exists() else "?"
            found[int(directory.name)] = name
    return found


def _names(environment: bytes, mark: bytes) -> bool:
    variables = (b"CRATER_DEMO_HOME=", b"CRATER_SCRATCH_DIR=")
    values = [part.split(b"=", 1)[1] for part in environment.split(b"\0") if part.startswith(variables)]
    return any(value == mark or value.startswith(mark + b"/") for value in values)


def _is_ours(command: bytes, mark: bytes) -> bool:
    parts = command.split(b"\0")
    return any(b"crater" in part for part in parts[:4]) and any(part.startswith(mark + b"/") for part in parts)


def stop_leftovers(home: Path, grace_s: float = 3.0) -> dict[int, str]:
    """End what is left of this home; answers what was found."""
    found = leftovers(home)
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        until = time.monotonic() + patience_s
        left = leftovers(home)
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = leftovers(home)
        if not left:
            break
    return found


def tail(log: Path, lines: int = 25) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return "  (it wrote nothing)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (it wrote nothing)"


def program(name: str) -> str:
    """A console script of this very environment."""
    return str(Path(sys.executable).with_name(name))
