"""Real etcd and PostgreSQL servers for tests: on free ports, in folders of their own, ended with the test run."""

from __future__ import annotations

import atexit
import contextlib
import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psycopg
from harness import free_port, wait_until

START_S = 30.0
_running: set[subprocess.Popen[bytes]] = set()
_folders: set[Path] = set()


class Server:
    """A server process with a folder. `stop`, `kill`, `pause` and `start` as often as a test likes; the data stay."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"crater-{name}-"))
        _folders.add(self.folder)
        self.process: subprocess.Popen[bytes] | None = None

    def _spawn(self, command: list[str], user: str | None = None) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, user=user, cwd=self.folder, start_new_session=True
            )
        _running.add(self.process)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8", "replace")

    def kill(self, sig: int = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            # A paused server cannot take any other signal.
            for each in (sig, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(each)
            process.wait(20)
            _running.discard(process)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        _folders.discard(self.folder)


class EtcdServer(Server):
    """One member. `peers` are the peer URLs of the whole cluster by name, for more than one."""

    def __init__(self, name: str = "m1", peers: dict[str, str] | None = None, *arguments: str) -> None:
        super().__init__("etcd")
        self.name = name
        self.peers = peers or {name: f"http://127.0.0.1:{free_port()}"}
        self.url = f"{'https' if '--cert-file' in arguments else 'http'}://127.0.0.1:{free_port()}"
        self.arguments = arguments

    def start(self, wait: bool = True) -> EtcdServer:
        peer = self.peers[self.name]
        cluster = ",".join(f"{name}={url}" for name, url in self.peers.items())
        self._spawn(
            [
                *("etcd", "--name", self.name, "--data-dir", str(self.folder / "data"), "--logger", "zap", "--log-level", "warn"),
                *("--listen-client-urls", self.url, "--advertise-client-urls", self.url, "--listen-peer-urls", peer),
                *("--initial-advertise-peer-urls", peer, "--initial-cluster", cluster, *self.arguments),
            ]
        )
        if wait:
            wait_until(lambda: _answers(self.url), START_S, f"etcd: {self.log[-2000:]}")
        return self


def _answers(url: str) -> bool:
    import httpx

    if url.startswith("https://"):  # It may want a certificate that is not ours to show: that it listens is enough.
        address = httpx.URL(url)
        with contextlib.suppress(OSError), socket.create_connection((address.host, address.port or 0), timeout=2):
            return True
        return False
    with contextlib.suppress(httpx.HTTPError):
        answer = httpx.post(f"{url}/v3/kv/range", json={"key": "AA=="}, timeout=2)
        return answer.status_code == 200
    return False


def etcd_cluster(members: int) -> list[EtcdServer]:
    """All of them, started and agreed."""
    peers = {f"m{n}": f"http://127.0.0.1:{free_port()}" for n in range(1, members + 1)}
    servers = [EtcdServer(name, peers).start(wait=False) for name in peers]
    for server in servers:
        wait_until(lambda server=server: _answers(server.url), START_S, f"etcd: {server.log[-2000:]}")
    return servers


class PostgresServer(Server):
    """Runs as another user when the tests run as root: PostgreSQL refuses root."""

    def __init__(self) -> None:
        super().__init__("postgres")
        self.port = free_port()
        self.user = None if os.geteuid() else _unprivileged()
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))  # noqa: PTH207
        programs = Path(found[-1]).parent if found else Path(shutil.which("initdb") or "/usr/bin/initdb").parent
        self._postgres = programs / "postgres"
        if self.user is not None:
            shutil.chown(self.folder, self.user)
        self.folder.chmod(0o755)
        command = [str(programs / "initdb"), "-D", str(self.folder / "data"), "-U", "crater", "-A", "trust", "-N", "-E", "UTF8"]
        made = subprocess.run(
            [*command, "--locale=C.UTF-8"], capture_output=True, user=self.user, cwd=self.folder, check=False, timeout=60
        )
        assert made.returncode == 0, made.stderr.decode()
        self._databases = 0

    @property
    def base(self) -> str:
        return f"postgresql://crater@127.0.0.1:{self.port}"

    def start(self, wait: bool = True) -> PostgresServer:
        settings = [f"port={self.port}", "listen_addresses=127.0.0.1", f"unix_socket_directories={self.folder}"]
        settings += ["fsync=off", "shared_buffers=32MB", "max_connections=100"]
        command = [str(self._postgres), "-D", str(self.folder / "data")]
        self._spawn([*command, *(word for setting in settings for word in ("-c", setting))], self.user)
        if wait:
            wait_until(self._answers, START_S, f"PostgreSQL: {self.log[-2000:]}")
        return self

    def stop(self) -> None:
        """At once, and cleanly: connections are cut."""
        self.kill(signal.SIGINT)

    def _answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(f"{self.base}/postgres", connect_timeout=2).close()
            return True
        return False

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"crater_{self._databases}"
        with psycopg.connect(f"{self.base}/postgres", autocommit=True) as db:
            db.execute(f"CREATE DATABASE {name} TEMPLATE template0")  # type: ignore[call-overload]
        return f"{self.base}/{name}"


def _unprivileged() -> str:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise AssertionError("there is no user to run PostgreSQL as")


@atexit.register
def _end_all() -> None:
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
