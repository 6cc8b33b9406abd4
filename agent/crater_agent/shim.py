"""The spawner: a small process that is the parent of every workload, outlives the agent, and writes down how each one ended.

Started as `python -I -S shim.py DATA_DIR`, standard library only, so that a fork is cheap. It listens on a Unix socket in
the agent's data directory for one JSON object a line, and stops what may be started elsewhere when no agent renews its lease.
"""

# ruff: noqa: PTH108, PTH123
# (pathlib costs the spawner memory and time; starting programs without a shell is its work)

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

if __name__ == "__main__":
    # Started as a file and without site-packages: the package is the folder that the file is in.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
from crater_agent import forked
from crater_agent.guards import Guards
from crater_agent.templates import TemplateFault, Templates

PROTOCOL = 3
"""3: orders may ask for mounts."""
SOCKET = "shim.sock"
IDLE_LIFE_S = 2.0
"""How long a spawner without agent and children waits before it ends."""
FIRST_AGENT_S = 20.0
"""How long it waits for the agent that started it."""
JOINED = b"\0"
"""What a parked child says first; an order may reach it before."""
_PR_SET_CHILD_SUBREAPER = 36
Message = dict[str, Any]


def _noted(number: int, frame: object) -> None:
    """The wakeup descriptor has said it already."""


class Child:
    def __init__(self, name: str, pid: int, order: Message) -> None:
        self.name, self.pid = name, pid
        self.directory: str = order["dir"]
        self.procs_files: list[str] = order.get("procs_files", [])
        self.restartable: bool = order.get("restartable", True)
        self.grace_s: float = order.get("fence_grace_ms", 0) / 1000
        self.fenced = False


class Starting:
    """A start whose end is not known: the pipe says why it failed, or closes when the program runs."""

    def __init__(self, order: Message, why_fd: int, connection: socket.socket) -> None:
        self.order, self.why_fd, self.connection = order, why_fd, connection
        self.number: int | None = order.get("n")
        self.why = b""


class Parked:
    """A child that has joined its cgroup and waits to be told what to become.

    Joining costs the kernel ten milliseconds and more, because it waits for every processor to take notice; a task that
    takes over a parked child does not pay for it.
    """

    def __init__(self, pid: int, orders_fd: int, why_fd: int) -> None:
        self.pid, self.orders_fd, self.why_fd = pid, orders_fd, why_fd

    def hand_over(self, order: Message) -> bool:
        body = json.dumps(order).encode()
        body = len(body).to_bytes(8, "big") + body
        try:
            while body:
                body = body[os.write(self.orders_fd, body) :]
        except OSError:
            # It acts on a whole order only, so it has done nothing.
            return False
        finally:
            os.close(self.orders_fd)
        return True


def _end_what_started(order: Message) -> None:
    """A template that broke with an order in its hands may have forked the workload: it must not run beside its next attempt."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        with open(f"{order['dir']}/started.json", "rb") as file:
            started = json.loads(file.read())
        if forked.start_ticks(started["pid"]) == started["start_ticks"]:
            os.killpg(started["pid"], signal.SIGKILL)


class Shim:
    def __init__(self, data_dir: str) -> None:
        os.chdir(data_dir)
        self.children: dict[int, Child] = {}
        self.starting: dict[int, Starting] = {}
        self.parked: dict[str, Parked] = {}
        self.templates = Templates()
        self.guards = Guards()
        self.selector = selectors.DefaultSelector()
        self.listener = self._listen()
        self.agents: dict[socket.socket, bytearray] = {}
        self.quitting = False
        self.fence_at: float | None = None
        self.alone_since = time.monotonic() + FIRST_AGENT_S
        self.wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _noted)
        # The agent's Ctrl-C or log-out is not the workloads'.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.wake_read, selectors.EVENT_READ, self._woken)
        # What leaves its session and loses its parent comes to us, not to init, so it can be reaped and found.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)
        old = os.umask(0o077)
        listener.bind(SOCKET)
        os.umask(old)
        listener.listen(4)
        listener.setblocking(False)
        return listener

    def run(self) -> None:
        while not self._done():
            for key, _ in self.selector.select(self._patience()):
                # One of them may have closed what the next one is about, or given its descriptor to another.
                if self.selector.get_map().get(key.fileobj) is key:
                    key.data()
            self._reap()
            self._fence()
            self.templates.sweep()
        self.templates.end_all()
        self._unpark()
        os.unlink(SOCKET)

    def _done(self) -> bool:
        if self.children or self.agents or (self.guards and not self.quitting):
            return self.quitting and not self.children
        return self.quitting or time.monotonic() - self.alone_since > IDLE_LIFE_S

    def _patience(self) -> float | None:
        restartable = [child.grace_s for child in self.children.values() if child.restartable] + self.guards.graces()
        if restartable and self.fence_at is not None:
            return max(0.05, self.fence_at - max(restartable) - time.monotonic())
        return None if self.agents or self.children or self.guards else IDLE_LIFE_S / 4

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_read, 4096)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        # Blocking on purpose: messages are short, and an agent that does not read is an agent that is gone.
        connection.settimeout(5.0)
        self.agents[connection] = bytearray()
        self.selector.register(connection, selectors.EVENT_READ, functools.partial(self._read, connection))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._hang_up(connection)
            return
        buffer = self.agents[connection]
        buffer += data
        while (end := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            message: Message = json.loads(line)
            answer = self._handle(message, connection)
            if answer is not None:
                self._send(connection, {"re": message.get("n"), **answer})

    def _hang_up(self, connection: socket.socket) -> None:
        if connection in self.agents:
            self.selector.unregister(connection)
            del self.agents[connection]
            connection.close()
            self.alone_since = time.monotonic()
            if not self.agents:
                self._unpark()

    def _send(self, connection: socket.socket, message: Message) -> None:
        try:
            connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self._hang_up(connection)

    def _handle(self, message: Message, connection: socket.socket) -> Message | None:
        what = message["op"]
        if what == "spawn":
            return self._spawn(message, connection)
        if what == "park":
            self._park(message["group"], message["procs_files"])
            return None
        if what == "unpark":
            self._unpark()
            return {}
        if what == "guard":
            self.guards.add(message)
            return None
        if what == "unguard":
            self.guards.drop(message["id"])
            self.alone_since = time.monotonic()
            return None
        if what == "renew":
            # Of the lease: what may be started elsewhere lives no longer than this unless it is renewed again.
            self.fence_at = time.monotonic() + message["for_ms"] / 1000
            return None
        if what == "hello":
            children = [{"id": child.name, "pid": child.pid} for child in self.children.values()]
            return {"protocol": PROTOCOL, "pid": os.getpid(), "children": children}
        if what == "quit":
            self.quitting = True
            return {}
        return {"error": f"unknown op {what!r}"}

    def _spawn(self, order: Message, connection: socket.socket) -> Message | None:
        """The answer, when it is known at once; else it follows when the program runs or has failed to."""
        if any(child.name == order["id"] for child in self.children.values()):
            return {"error": "it runs already"}
        if order.get("restartable", True) and self.fence_at is not None and time.monotonic() >= self.fence_at:
            # The start took so long that the lease is over: it may run elsewhere by now.
            return {"error": "its lease has run out", "again": 1}
        parked = self.parked.pop(order.get("group", ""), None)
        if parked is not None:
            self.selector.unregister(parked.why_fd)
            if not order.get("template") and parked.hand_over(order):
                self._watch(order, parked.pid, parked.why_fd, connection)
                return None
            self._dismiss(parked)
        why_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            warm = self.templates.fork(order, write_fd) if order.get("template") else None
            pid = os.fork() if warm is None else warm
        except (OSError, TemplateFault) as error:
            os.close(why_fd)
            os.close(write_fd)
            _end_what_started(order)
            return {"error": f"could not fork: {error}"}
        if pid == 0:
            forked.become(order, write_fd, parent)
        os.close(write_fd)
        self._watch({**order, "warm": warm is not None}, pid, why_fd, connection)
        return None

    def _watch(self, order: Message, pid: int, why_fd: int, connection: socket.socket) -> None:
        self.children[pid] = Child(order["id"], pid, order)
        self.starting[pid] = Starting(order, why_fd, connection)
        self.selector.register(why_fd, selectors.EVENT_READ, functools.partial(self._told, pid))

    def _told(self, pid: int) -> None:
        starting = self.starting[pid]
        part = os.read(starting.why_fd, 4096)
        if part:
            starting.why += part.removeprefix(JOINED)
            return
        self.selector.unregister(starting.why_fd)
        os.close(starting.why_fd)
        del self.starting[pid]
        if starting.why:
            self.children.pop(pid, None)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{starting.order['dir']}/started.json")
            answer: Message = {"error": starting.why.decode(errors="replace")}
        else:
            answer = {"pid": pid, "start_ticks": forked.start_ticks(pid), "warm": starting.order.get("warm", False)}
        if starting.connection in self.agents:
            self._send(starting.connection, {"re": starting.number, **answer})

    def _park(self, group: str, procs_files: list[str]) -> None:
        orders_read, orders_write = os.pipe2(os.O_CLOEXEC)
        why_read, why_write = os.pipe2(os.O_CLOEXEC)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            for fd in (orders_read, orders_write, why_read, why_write):
                os.close(fd)
            return
        if pid == 0:
            forked.wait_parked(procs_files, orders_read, why_write, parent)
        os.close(orders_read)
        os.close(why_write)
        self.parked[group] = Parked(pid, orders_write, why_read)
        self.selector.register(why_read, selectors.EVENT_READ, functools.partial(self._parked_said, group))

    def _parked_said(self, group: str) -> None:
        parked = self.parked[group]
        if os.read(parked.why_fd, 4096) == JOINED:
            return
        self.selector.unregister(parked.why_fd)
        os.close(parked.orders_fd)
        self._dismiss(self.parked.pop(group))

    def _unpark(self) -> None:
        for parked in self.parked.values():
            self.selector.unregister(parked.why_fd)
            os.close(parked.orders_fd)
            self._dismiss(parked)
        self.parked.clear()

    def _dismiss(self, parked: Parked) -> None:
        os.close(parked.why_fd)
        with contextlib.suppress(ProcessLookupError):
            os.kill(parked.pid, signal.SIGKILL)
        os.waitpid(parked.pid, 0)

    def _reap(self) -> None:
        while True:
            try:
                # Looked at before it is reaped: as long as the pid is a zombie's, its process group cannot be another's.
                ended_one = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended_one is None:
                return
            while ended_one.si_pid in self.starting:
                self._told(ended_one.si_pid)
            child = self.children.pop(ended_one.si_pid, None)
            if child is not None and (not self.agents or child.fenced):
                # Nobody else is here to end what it leaves behind.
                self._kill(child)
            _, status, usage = os.wait4(ended_one.si_pid, 0)
            if child is None:
                self.templates.ended(ended_one.si_pid)
                continue
            ended: Message = {
                "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
                "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
                "fenced": child.fenced,
                "cpu_ms": int((usage.ru_utime + usage.ru_stime) * 1000),
                "memory_peak_bytes": usage.ru_maxrss * 1024,
                "at_ms": time.time_ns() // 1_000_000,
            }
            try:
                # An agent that is here writes the end down itself before it tells anybody.
                forked.write_record(child.directory, "exit.json", ended, durably=not self.agents)
            except OSError as error:
                # A full disk must not cost the exit code while an agent is here to hear it.
                sys.stderr.write(f"crater-agent spawner: exit of {child.name} not written: {error}\n")
            for connection in list(self.agents):
                self._send(connection, {"op": "exit", "id": child.name, "exit": ended})
            if not self.children and not self.agents:
                self.alone_since = time.monotonic()

    def _fence(self) -> None:
        """Asks in time and kills on time: at `fence_at` nothing that may be started elsewhere is left alive."""
        if self.fence_at is None:
            return
        now = time.monotonic()
        for child in self.children.values():
            if not child.restartable or now < self.fence_at - child.grace_s:
                continue
            if not child.fenced:
                child.fenced = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGTERM)
            if now >= self.fence_at:
                self._kill(child)
        self.guards.fence(self.fence_at, now)

    def _kill(self, child: Child) -> None:
        for path in child.procs_files[:1]:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                for pid in file.read().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def main() -> int:
    data_dir = sys.argv[1]
    lock = os.open(f"{data_dir}/shim.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return 0
        raise
    with contextlib.suppress(OSError):
        os.setsid()
    shim = Shim(data_dir)
    # Tells the agent that started us that the socket is there.
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    shim.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
