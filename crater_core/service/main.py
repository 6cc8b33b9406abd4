"""`crater-scheduler`: reads its file, opens the store, serves until it is told to stop."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import socket
import sys
from pathlib import Path

from crater_core import __version__
from crater_core.errors import BadConfiguration, CraterError
from crater_core.scheduling import STRATEGIES
from crater_core.service.auth import hash_of, new_token
from crater_core.service.config import ROLES, SchedulerConfig, load_config
from crater_core.service.garbage import look_seldom
from crater_core.service.logs import start_logging
from crater_core.service.metrics import AddressInUse
from crater_core.service.plugins import load_strategies
from crater_core.service.server import serve
from crater_core.store.opening import shown

EXIT_BAD_CONFIGURATION = 2
EXIT_STORE_UNUSABLE = 3
EXIT_ADDRESS_IN_USE = 4
BACKLOG = 2048
SWITCH_S = 0.0005
"""A thread that comes back from the disk must not wait 5 ms (the interpreter's default) for the busy event loop."""

_ABOUT = """\
The Crater scheduler: takes tasks over HTTP, places them on the nodes whose agents have registered, and remembers
everything in its store. Without a configuration file it serves this machine alone, on 127.0.0.1:8080.
"""
_MORE = """\
examples:
  crater-scheduler                                   serve this machine with the defaults
  crater-scheduler --config scheduler.yaml           serve as the file says
  crater-scheduler --config scheduler.yaml --check   only say whether the file is right
  crater-scheduler token new alice --role submitter  make a token and its entry for the file

exit codes: 0 stopped as asked, 2 wrong configuration, 3 store unusable, 4 address in use
"""


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    options = _parser().parse_args(arguments)
    if options.command == "token":
        _print_token(options.name, options.role, options.projects)
        return
    sys.exit(_run(options))


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("crater-scheduler", description=_ABOUT, epilog=_MORE, formatter_class=form)
    parser.add_argument("--config", type=Path, metavar="FILE", help="scheduler.yaml; docs/scheduler.md explains every key")
    parser.add_argument("--listen", metavar="HOST:PORT", help="in place of the file's `listen`; port 0 takes a free one")
    parser.add_argument("--check", action="store_true", help="read the file, say what is wrong with it, and end")
    parser.add_argument("--version", action="version", version=f"crater-scheduler {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="token new NAME", title="other things to do")
    token = commands.add_parser("token", help="make a token")
    what = token.add_subparsers(dest="what", required=True)
    new = what.add_parser("new", help="print a new token once, and the entry that lets it in")
    new.add_argument("name", metavar="NAME", help="who will use it; tasks carry it as their user")
    new.add_argument("--role", choices=ROLES, default="submitter")
    new.add_argument("--project", dest="projects", action="append", default=[], help="repeatable; none: all projects")
    return parser


def _print_token(name: str, role: str, projects: list[str]) -> None:
    token = new_token()
    print(f"The token, shown this once:\n\n  {token}\n\nIts entry for scheduler.yaml:\n\ntokens:")
    scope = f", projects: [{', '.join(projects)}]" if projects else ""
    print(f"  - {{name: {name}, role: {role}{scope}, sha256: {hash_of(token)}}}")


def _run(options: argparse.Namespace) -> int:
    try:
        load_strategies()
        config = load_config(options.config, options.listen, tuple(STRATEGIES))
        if options.check:
            print(f"{options.config or 'the defaults'}: right")
            return 0
        _start_logging(config)
    except BadConfiguration as error:
        return _give_up(error.message, EXIT_BAD_CONFIGURATION)
    try:
        listener = _listen(*config.address)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        why = (
            "is in use by another process; stop it, or choose another with --listen"
            if in_use
            else f"cannot be used: {error.strerror}"
        )
        return _give_up(f"{config.listen} {why}", EXIT_ADDRESS_IN_USE if in_use else EXIT_BAD_CONFIGURATION)
    with listener:
        return _serve(config, listener)


def _serve(config: SchedulerConfig, listener: socket.socket) -> int:
    sys.setswitchinterval(SWITCH_S)
    look_seldom()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(serve(config, listener, _ready))
    except AddressInUse as error:
        return _give_up(error.message, EXIT_ADDRESS_IN_USE)
    except BadConfiguration as error:
        return _give_up(error.message, EXIT_BAD_CONFIGURATION)
    except CraterError as error:
        return _give_up(error.message, EXIT_STORE_UNUSABLE)


def _start_logging(config: SchedulerConfig) -> None:
    try:
        start_logging(config.log)
    except OSError as error:
        raise BadConfiguration(f"log.file: found {config.log.file}; expected a file that can be written: {error}") from error


def _loop_factory():
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _listen(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # A name with both kinds of address (localhost) is served on the one that clients try for 127.0.0.1.
    family, kind, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _ready(url: str, metrics_url: str | None, config: SchedulerConfig) -> None:
    metrics = f", metrics at {metrics_url}/metrics" if metrics_url else ""
    print(f"crater-scheduler {__version__} is ready at {url} (store {shown(config.store_url)}{metrics})", flush=True)


def _give_up(message: str, code: int) -> int:
    logging.getLogger("crater").debug("giving up: %s", message)
    print(f"crater-scheduler: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
