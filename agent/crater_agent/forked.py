"""In the forked child: from a copy of the spawner to the workload, step by step, and what went wrong if one fails.

Standard library only, since the spawner imports it. A fork shares its parent's memory, and pays for each page that it touches
first, so little is touched here: plain system calls, no generators, no `json`, no wrappers in Python around what C can do.
"""

# ruff: noqa: S606
# (starting programs without a shell is its work)

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from crater_agent import inside

Message = dict[str, Any]
_CHANGED_SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in ("PIPE", "XFSZ", "CHLD", "TERM", "INT", "HUP"))
"""What Python, the spawner or a template takes otherwise than a program expects."""
_set_handler: Callable[[int, int], object] = getattr(signal.signal, "__wrapped__", signal.signal)
"""Without a member of an enumeration for each number that it takes or gives."""


def become(order: Message, error_fd: int, parent: int) -> None:
    """In the child: become the workload. Never returns."""
    step = f"run {order['program']}"
    try:
        error_fd = take_on(order, error_fd, parent)
        os.execve(order["program"], order["argv"], order["env"])
    except StepFailed as error:
        os.write(error_fd, str(error).encode()[:4000])
    except BaseException as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        os.write(error_fd, f"could not {step}: {why}".encode()[:4000])
    finally:
        os._exit(127)


def wait_parked(procs_files: list[str], orders_fd: int, why_fd: int, parent: int) -> None:
    """In a parked child: join, say so, and wait. Never returns."""
    try:
        orders_fd, why_fd = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (orders_fd, why_fd))
        orders_fd, why_fd = os.dup2(orders_fd, 3, inheritable=False), os.dup2(why_fd, 4, inheritable=False)
        # Nothing of the spawner may stay open here: its lock and its connections would outlive it.
        os.closerange(5, 1_048_576)
        settle(procs_files)
        # What the order will need is touched now, while nobody waits for it.
        ticks = start_ticks("self")
        json.loads(b'{"argv": ["true"], "env": {"LANG": "C"}, "restartable": true, "uid": 1}')
        os.write(why_fd, b"\0")
        data = b""
        while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "big"):
            part = os.read(orders_fd, 1 << 20)
            if not part:
                os._exit(0)
            data += part
        become({**json.loads(data[8:]), "settled": True, "start_ticks": ticks}, why_fd, parent)
    except BaseException as error:
        os.write(why_fd, f"{error}".encode()[:4000])
    finally:
        os._exit(127)


class StepFailed(Exception):
    """A step on the way to becoming a workload did not succeed; the text says which and why."""


def settle(procs_files: list[str]) -> None:
    """In a fresh fork: its own session, its cgroup, and ordinary signals."""
    signal.set_wakeup_fd(-1)
    for number in _CHANGED_SIGNALS:
        _set_handler(number, 0)  # SIG_DFL
    os.setsid()
    try:
        for path in procs_files:
            put(path, b"0", os.O_WRONLY)
    except OSError as error:
        raise StepFailed(f"could not join the cgroup: {error.strerror or error}") from None
    with contextlib.suppress(OSError):
        # When the whole machine runs out of memory a workload goes before the agent does.
        put("/proc/self/oom_score_adj", b"500", os.O_WRONLY)


def take_on(order: Message, error_fd: int, parent: int) -> int:
    """In a fresh fork: take on the workload's session, limits, files and user. Returns `error_fd` where it is then.

    Raises StepFailed. Ends the process when `parent` is no longer its parent: then nobody would know of it.
    """
    if not order.get("settled"):
        settle(order.get("procs_files", []))
    step = "open the log files"
    try:
        null = os.open("/dev/null", os.O_RDONLY)
        out = os.open(order["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        err = os.open(order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        step = "write the start record"
        began = (os.getpid(), order.get("start_ticks") or start_ticks("self") or 0, time.time_ns() // 1_000_000)
        record = b'{"pid": %d, "start_ticks": %d, "at_ms": %d}' % began
        put(f"{order['dir']}/started.json", record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if os.getppid() != parent:
            os._exit(127)
        if order.get("inside") is not None:
            step = "mount"
            inside.enter(order["inside"])
        if order.get("uid") is not None:
            step = "change to the workload's user"
            os.setgroups(order.get("groups", []))
            os.setgid(order["gid"])
            os.setuid(order["uid"])
        os.umask(order.get("umask", 0o022))
        step = f"enter the working directory {order['cwd']}"
        os.chdir(order["cwd"])
    except OSError as error:
        what = f"mount {error.filename}" if step == "mount" else step
        raise StepFailed(f"could not {what}: {error.strerror or error}") from None
    # Descriptors last, so that until here a failure can be told. First away from the standard ones, which are overwritten.
    error_fd = fcntl.fcntl(error_fd, fcntl.F_DUPFD_CLOEXEC, 10)
    for target, source in enumerate((null, out, err)):
        os.dup2(source, target)
    # The pipe that tells the parent of a failed start is the one descriptor kept; exec closes it.
    error_fd = os.dup2(error_fd, 3, inheritable=False)
    os.closerange(4, 1_048_576)
    return error_fd


def write_record(directory: str, name: str, content: Message, durably: bool = True) -> None:
    """One small JSON file. Torn by a power cut it does not parse, and counts as not there."""
    fd = os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, json.dumps(content).encode())
        if durably:
            os.fsync(fd)
    finally:
        os.close(fd)


def start_ticks(pid: int | str) -> int | None:
    """When a process started, in clock ticks since boot: with the pid this names a process for ever."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            return int(os.read(fd, 4096).rpartition(b")")[2].split()[19])
        finally:
            os.close(fd)
    except (OSError, ValueError, IndexError):
        return None


def put(path: str, content: bytes, flags: int) -> None:
    """One small file in one go."""
    fd = os.open(path, flags, 0o600)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
