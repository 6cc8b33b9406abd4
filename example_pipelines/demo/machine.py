"""What this machine has to share out: cores, memory, a GPU, and ports nobody listens on."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

GB = 10**9
_PORT_BLOCK = 50
_PORT_BLOCKS = range(20_000, 32_000, _PORT_BLOCK)


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    memory_gb: float
    real_gpus: int


def look() -> Machine:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(len(os.sched_getaffinity(0)), memory_bytes / GB, _count_gpus())


def _count_gpus() -> int:
    """As the driver's own tool lists them; none without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def share_of_cores(cores: int) -> float:
    """Half of the machine for each of two nodes."""
    return max(0.5, cores / 2)


def share_of_memory_gb(memory_gb: float) -> float:
    """At most 4 GB a node; both together leave a tenth of the machine alone."""
    return round(min(4.0, memory_gb * 0.45), 1)


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that are free at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def free_blocks(count: int) -> list[tuple[int, int]]:
    """First port and size of blocks for services, a block a node: the nodes here share one address."""
    blocks = list(_PORT_BLOCKS)
    start = os.getpid() % len(blocks)
    found = [first for first in blocks[start:] + blocks[:start] if _is_free(range(first, first + 10))][:count]
    if len(found) < count:
        raise OSError("no free ports between 20000 and 32000")
    return [(first, _PORT_BLOCK) for first in found]


def _is_free(ports: Sequence[int]) -> bool:
    return all(port_is_free(port) for port in ports)


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
