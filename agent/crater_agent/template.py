"""A template: a process that has imported what its tasks need, and forks one of them whenever the spawner asks.

Started by the spawner with the workload's own Python, user and environment profile, as
`python -m crater_agent.template MODULE ...`, with a Unix socket as descriptor 3. Each order arrives as four bytes of
length, JSON, and one descriptor (the pipe that tells of a failed start); the answer is a line of JSON with the pid. The task
becomes the spawner's own child: its parent for a moment ends at once, and the spawner is the subreaper.

A fork of a large process takes several milliseconds, and it takes two. So when nobody asks for one the template makes a fork that
waits for its order: the spare.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from crater_agent import forked

SOCKET_FD = 3
ADOPTION_TIMEOUT_S = 5.0
RSS_MAX_BYTES = 2 * 1024**3
QUIET_S = 0.05
"""After an order, how long no other comes before a spare is made: while tasks start in a row they need the processor."""
Message = dict[str, Any]


def main() -> int:
    spawner, modules = os.getppid(), sys.argv[1:]
    connection = socket.socket(fileno=SOCKET_FD)
    connection.set_inheritable(False)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        for name in modules:
            importlib.import_module(name)
        why = unfit()
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        _answer(connection, {"unfit": why[:2000]})
        return 1
    watched = Sources()
    gc.collect()
    gc.freeze()  # What is shared stays shared: the collector of a fork does not write into these pages.
    _answer(connection, {"ready": True})
    spare: Spare | None = None
    while True:
        if spare is None and not select.select([connection], [], [], QUIET_S)[0]:
            spare = Spare.fork(connection, spawner)
        order, error_fd = receive(connection)
        if order is None or os.getppid() != spawner:
            return 0
        changed = watched.changed() or too_large()
        if changed:
            _answer(connection, {"stale": changed})
            return 0
        pid = spare.hand_over(order, error_fd) if spare is not None else 0
        spare = None
        pid = pid or fork_task(order, error_fd, spawner)
        os.close(error_fd)
        _answer(connection, {"pid": pid})


def unfit() -> str:
    """Why this process must not be forked, if it must not: a fork takes neither threads nor a CUDA context with it.

    Thread pools of linear-algebra libraries are no hindrance: those make themselves anew after a fork.
    """
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"an imported module started threads: {', '.join(threads)}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an imported module has initialised CUDA"
    return ""


def too_large() -> str:
    resident = int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return f"it has grown to {resident >> 20} MiB" if resident > RSS_MAX_BYTES else ""


class Sources:
    """The files of the imported modules that people edit: all but the standard library's and installed packages'."""

    def __init__(self) -> None:
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        self._stamps = {file: _stamp(file) for file in files if file and not _installed(file)}

    def changed(self) -> str:
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                return f"{file} has changed"
        return ""


def _installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file or file.startswith((sys.base_prefix + os.sep, "<"))


def _stamp(file: str) -> tuple[int, int] | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def receive(connection: socket.socket) -> tuple[Message | None, int]:
    """The next order with its descriptor, or None when the spawner has gone."""
    data, fds, _, _ = socket.recv_fds(connection, 4, 1)
    if len(data) < 4 or not fds:
        return None, -1
    (length,) = struct.unpack("!I", data)
    body = bytearray()
    while len(body) < length:
        part = connection.recv(length - len(body))
        if not part:
            return None, -1
        body += part
    return json.loads(bytes(body)), fds[0]


def _answer(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class Spare:
    """A fork that waits for its order. It ends when the template does."""

    def __init__(self, pid: int, orders: socket.socket) -> None:
        self._pid, self._orders = pid, orders

    @classmethod
    def fork(cls, connection: socket.socket, spawner: int) -> Spare | None:
        """None where no further process can be had."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        def wait() -> NoReturn:
            # Held open here, they would keep the template's end from being seen.
            connection.close()
            ours.close()
            _wait_for_order(theirs, spawner)

        try:
            pid = fork_away(wait)
        except OSError:
            pid = 0
        theirs.close()
        if not pid:
            ours.close()
            return None
        return cls(pid, ours)

    def hand_over(self, order: Message, error_fd: int) -> int:
        """The pid of the task; 0 when the spare has gone. It acts on a whole order only, so then it has done nothing."""
        body = json.dumps(order).encode()
        try:
            socket.send_fds(self._orders, [struct.pack("!I", len(body))], [error_fd])
            self._orders.sendall(body)
        except OSError:
            return 0
        finally:
            self._orders.close()
        return self._pid


def _wait_for_order(orders: socket.socket, spawner: int) -> NoReturn:
    try:
        order, error_fd = receive(orders)
    except BaseException:
        os._exit(0)
    if order is None:
        os._exit(0)
    _become(order, error_fd, spawner)


def fork_task(order: Message, error_fd: int, spawner: int) -> int:
    return fork_away(lambda: _become(order, error_fd, spawner))


def fork_away(main: Callable[[], NoReturn]) -> int:
    """Fork twice, so that what runs `main` is the spawner's child, and tell its pid."""
    read_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid == 0:
            os.close(read_fd)
            os.close(write_fd)
            main()
        os.write(write_fd, str(pid).encode())
        os._exit(0)
    os.close(write_fd)
    pid = int(os.read(read_fd, 32) or b"0")
    os.close(read_fd)
    os.waitpid(middle, 0)
    return pid


def _become(order: Message, error_fd: int, spawner: int) -> NoReturn:
    """In the fork: take on the task's identity and limits, then run its module. Never returns."""
    code = 127
    try:
        until = time.monotonic() + ADOPTION_TIMEOUT_S
        while os.getppid() != spawner and time.monotonic() < until:
            time.sleep(0.0002)
        error_fd = forked.take_on(order, error_fd, spawner)
        _forget_the_template(order)
        os.close(error_fd)  # As exec does: the start has succeeded.
        code = _run_module(order["argv"])
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(error_fd, f"{error}".encode()[:4000] or b"it could not be started")
    finally:
        os._exit(code)


def _forget_the_template(order: Message) -> None:
    os.environ.clear()
    os.environ.update(order["env"])
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115 (lives as long as the process)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()  # Otherwise every fork would draw the same numbers.
    if torch is not None and (threads := order["env"].get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))  # The libraries read it at import, which was before this task was known.


def _run_module(argv: list[str]) -> int:
    """What `python -m MODULE ARGUMENTS` does, and the exit code it would end with."""
    module, arguments = argv[2], argv[3:]
    sys.argv = [module, *arguments]
    sys.path[0] = str(Path.cwd())
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # Waits for threads that are not daemons, as at any exit.
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())
