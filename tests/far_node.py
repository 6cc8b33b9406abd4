"""A machine of its own, as far as the network is concerned: a namespace on a cable that can be pulled. Made by root alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
from itertools import count

_numbers = count()


class FarNode:
    """`near_address` is reached from both sides: what listens there is this side's. `prefix` starts a command on the far side."""

    def __init__(self) -> None:
        number = os.getpid() * 8 + next(_numbers) % 8
        self._name = f"crater-{number}"
        self._bridge, self._near, self._far = (f"cr{number}{end}" for end in ("b", "n", "f"))
        # Of the block for measurements of networks (RFC 2544), which no machine uses otherwise.
        block = f"198.18.{number // 64 % 256}.{number % 64 * 4}".rsplit(".", 1)
        self.near_address, self.far_address = (f"{block[0]}.{int(block[1]) + host}" for host in (1, 2))
        self.prefix = ("nsenter", f"--net=/run/netns/{self._name}")
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("netns", "add", self._name)
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.near_address}/30", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", self._name)
        _ip("link", "set", self._near, "master", self._bridge, "up")
        _ip("-n", self._name, "addr", "add", f"{self.far_address}/30", "dev", self._far)
        for card in (self._far, "lo"):
            _ip("-n", self._name, "link", "set", card, "up")

    def cut(self) -> None:
        """Pull the cable: what is sent from either side is gone, without a word."""
        _ip("link", "set", self._near, "down")

    def mend(self) -> None:
        _ip("link", "set", self._near, "up")

    def close(self) -> None:
        for what in (("netns", "del", self._name), ("link", "del", self._near), ("link", "del", self._bridge)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(*what)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
