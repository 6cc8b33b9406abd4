"""Ports that the scheduler hands out, against what already listens on this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from crater_core.errors import RuntimeFailed


def refuse_busy(ports: Iterable[int]) -> None:
    """Raises RuntimeFailed that asks for another try: the scheduler then gives other ports."""
    for port in ports:
        for family in (socket.AF_INET, socket.AF_INET6):
            if _is_busy(family, port):
                raise RuntimeFailed(f"port {port} is in use by another program on this node", again=1)


def _is_busy(family: socket.AddressFamily, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # What an earlier task has only just closed does not count; who listens does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(("", port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
