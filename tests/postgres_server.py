"""A real PostgreSQL for tests, on a Unix socket in a folder of its own: nothing listens on a port."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

USER = "postgres"


def _program(name: str) -> str:
    """Debian keeps the server's programs off the PATH, one folder for each version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name) or name


class PostgresServer:
    """`pg_ctl` as a user that is not root, which PostgreSQL refuses to run as."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.socket = place / "socket"
        self._data = place / "data"
        root = os.geteuid() == 0
        self._as = {"user": USER, "group": pwd.getpwnam(USER).pw_gid, "extra_groups": []} if root else {}
        self.socket.mkdir()
        if root:
            for path in (place, self.socket):
                shutil.chown(path, USER)
        self._call("initdb", "-D", str(self._data), "-U", USER, "--auth=trust", "--no-sync", "-E", "UTF8")

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run([_program(program), *arguments], cwd=self.place, capture_output=True, text=True, **self._as)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def start(self) -> None:
        options = f"-c listen_addresses= -c unix_socket_directories={self.socket} -c max_connections=60"
        self._call("pg_ctl", "-D", str(self._data), "-l", str(self.place / "log"), "-o", options, "-w", "start")

    def stop(self, mode: str = "fast") -> None:
        self._call("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "stop")

    def create_database(self, name: str) -> str:
        """Its URL, as SQLAlchemy and psycopg understand it."""
        self._call("createdb", "-h", str(self.socket), "-U", USER, name)
        return f"postgresql://{USER}@/{name}?host={self.socket}"

    def query(self, database: str, sql: str) -> list[list[str]]:
        command = [_program("psql"), "-h", str(self.socket), "-U", USER, "-d", database, "-At", "-c", sql]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True)
        return [line.split("|") for line in done.stdout.splitlines()]


@contextlib.contextmanager
def a_postgres() -> Iterator[PostgresServer]:
    """Running, and gone afterwards with its data."""
    place = Path(tempfile.mkdtemp(prefix="crater-pg-"))
    server = PostgresServer(place)
    server.start()
    try:
        yield server
    finally:
        server.stop("immediate")
        shutil.rmtree(place, ignore_errors=True)
