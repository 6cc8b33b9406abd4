"""The spawner's side of templates: starts them, hands them orders to fork, and ends those that are old, idle or unfit.

A template only ever saves time. Where there is any doubt (none yet, still importing, code changed, unfit) the task starts cold.
Standard library only, since the spawner imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

TEMPLATES_MAX = 4
IDLE_LIFE_S = 900.0
ANSWER_TIMEOUT_S = 10.0
UNFIT_FOR_S = 600.0
"""How long a key whose template could not be made is not tried again."""
Message = dict[str, Any]


class TemplateFault(Exception):
    """A template broke while it had an order: whether it forked is not known, so the task must not start a second time here."""


class Template:
    def __init__(self, key: str, pid: int, connection: socket.socket) -> None:
        self.key, self.pid, self.connection = key, pid, connection
        self.ready = False
        self.used_at = time.monotonic()
        self._buffer = b""

    def read(self, timeout_s: float) -> Message | None:
        """The next line it has said, or None when it said nothing in time. Raises EOFError when it is gone."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self.connection], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                return None
            part = self.connection.recv(65536)
            if not part:
                raise EOFError
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def send(self, order: Message, error_fd: int) -> None:
        body = json.dumps(order).encode()
        socket.send_fds(self.connection, [struct.pack("!I", len(body))], [error_fd])
        self.connection.sendall(body)

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Templates:
    """At most `TEMPLATES_MAX`, the one used longest ago goes first."""

    def __init__(self) -> None:
        self._by_key: dict[str, Template] = {}
        self._unfit: dict[str, float] = {}

    def fork(self, order: Message, error_fd: int) -> int | None:
        """The pid of the task, now the caller's own child; None: start it cold. Raises TemplateFault."""
        wanted: Message = order["template"]
        key: str = wanted["key"]
        template = self._by_key.get(key)
        if template is not None and not self._is_ready(template):
            return None
        if template is None:
            self._start(wanted)
            return None
        template.used_at = time.monotonic()
        sent = {name: value for name, value in order.items() if name != "template"}
        try:
            template.send(sent, error_fd)
            answer = template.read(ANSWER_TIMEOUT_S)
        except (OSError, EOFError, ValueError) as error:
            self._drop(template)
            raise TemplateFault(f"its template ended: {error!r}") from None
        if answer is None:
            self._drop(template)
            raise TemplateFault("its template did not answer")
        if answer.get("pid"):
            return int(answer["pid"])
        self._drop(template)
        self._start(wanted)  # Stale: the code has changed. A fresh one is made while this task starts cold.
        return None

    def _is_ready(self, template: Template) -> bool:
        if template.ready:
            return True
        try:
            said = template.read(0.0)
        except (OSError, EOFError, ValueError):
            said = {"unfit": "it ended while it imported its modules"}
        if said is None:
            return False
        if said.get("ready"):
            template.ready = True
            return True
        sys.stderr.write(f"crater-agent spawner: no warm starts for {template.key[:12]}: {said.get('unfit')}\n")
        self._unfit[template.key] = time.monotonic()
        self._drop(template)
        return False

    def _start(self, wanted: Message) -> None:
        key = wanted["key"]
        if time.monotonic() - self._unfit.get(key, float("-inf")) < UNFIT_FOR_S:
            return
        while len(self._by_key) >= TEMPLATES_MAX:
            self._drop(min(self._by_key.values(), key=lambda template: template.used_at))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if pid == 0:
            _template_main(wanted, theirs)
        theirs.close()
        self._by_key[key] = Template(key, pid, ours)

    def sweep(self) -> None:
        """End those that nobody has used for long."""
        for template in list(self._by_key.values()):
            if time.monotonic() - template.used_at > IDLE_LIFE_S:
                self._drop(template)

    def ended(self, pid: int) -> None:
        """A child of the spawner has ended, maybe a template."""
        for template in list(self._by_key.values()):
            if template.pid == pid and template.ready:
                self._drop(template)

    def end_all(self) -> None:
        for template in list(self._by_key.values()):
            self._drop(template)

    def _drop(self, template: Template) -> None:
        self._by_key.pop(template.key, None)
        template.end()


def _template_main(wanted: Message, connection: socket.socket) -> None:
    """In the child: become the template. Never returns."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        log = os.open("templates.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        held = os.dup(connection.fileno())
        for target, source in enumerate((null, log, log)):
            os.dup2(source, target)
        moved = os.dup2(os.dup(held), 3)
        os.set_inheritable(moved, True)
        os.closerange(4, 1_048_576)
        if wanted.get("uid") is not None:
            os.setgroups(wanted.get("groups", []))
            os.setgid(wanted["gid"])
            os.setuid(wanted["uid"])
        os.chdir(wanted["cwd"])
        os.execve(wanted["argv"][0], wanted["argv"], wanted["env"])  # noqa: S606
    except BaseException as error:
        sys.stderr.write(f"crater-agent spawner: a template could not be started: {error!r}\n")
    finally:
        os._exit(127)
