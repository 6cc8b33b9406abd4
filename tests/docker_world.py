"""A real Docker engine of the tests' own, with images made of what is on this machine; nothing is fetched, nothing is left."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import docker
from agent_harness import poll_until

APPLETS = "sh cat echo sleep true false id touch mkdir ls env kill dd head printf test pwd ln wc yes df mount ps trap seq nproc"


class DockerWorld:
    """`dockerd` with its own data, socket and no network of its own: containers use the host's, or none."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="crater-dockerd-"))
        self.socket = self.root / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> DockerWorld:
        parts = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        command = ["dockerd", "--host", f"unix://{self.socket}"]
        command += [f"--{name}={self.root / part}" for name, part in parts.items()]
        command += ["--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        poll_until(self._answers, 30, f"dockerd answering; see {self.root / 'log'}")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.root / "log").read_text()[-2000:]
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        with contextlib.closing(self.client()) as client:
            return bool(client.ping())

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def client(self) -> Any:
        return docker.APIClient(base_url=f"unix://{self.socket}", version="1.41", timeout=30)

    def halt(self, number: signal.Signals = signal.SIGTERM) -> None:
        """SIGTERM takes the containers along; after SIGKILL they go on without an engine."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    def remove(self) -> None:
        if not self.running:
            # What a killed engine has left is known to the next one, which ends it.
            self._end_containerd()
            self.start()
        self.clear({})
        self.halt()
        self._end_containerd()
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (target := line.split()[4]).startswith(str(self.root)):
                subprocess.run(["umount", "-l", target], check=False)
        shutil.rmtree(self.root)

    def clear(self, filters: dict[str, list[str]]) -> None:
        """Remove containers, also those that somebody else is just removing."""

        def none_left() -> bool:
            found = client.containers(all=True, filters=filters)
            for container in found:
                with contextlib.suppress(docker.errors.APIError):
                    client.remove_container(container["Id"], force=True, v=True)
            return not found

        if self.running:
            with contextlib.closing(self.client()) as client:
                poll_until(none_left, 30, "no container left")

    def _end_containerd(self) -> None:
        """A killed dockerd leaves its containerd behind."""
        for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if os.fsencode(self.root) in words and words.split(b"\0")[0].endswith(b"containerd"):
                    os.kill(int(pid), signal.SIGTERM)
                    poll_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), 20, "containerd ended")

    # ---- images

    def add_busybox(self, name: str = "crater-busybox:1") -> str:
        self.add(busybox_layer(), name, ["ENV PATH=/bin", "WORKDIR /tmp"])
        return name

    def add(self, content: bytes, name: str, changes: list[str]) -> None:
        """An image of one layer."""
        repository, _, tag = name.partition(":")
        with contextlib.closing(self.client()) as client:
            client.import_image_from_data(content, repository=repository, tag=tag, changes=changes)


def busybox_layer(padding_bytes: int = 0) -> bytes:
    """A whole root file system: one static program under many names."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for directory in ("bin", "tmp", "etc", "proc", "dev"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
            tar.addfile(entry)
        tar.add(shutil.which("busybox") or "/bin/busybox", "bin/busybox")
        for applet in APPLETS.split():
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
        if padding_bytes:
            entry = tarfile.TarInfo("padding")
            entry.size = padding_bytes
            tar.addfile(entry, io.BytesIO(os.urandom(padding_bytes)))
    return content.getvalue()
