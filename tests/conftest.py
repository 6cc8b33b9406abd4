"""What every test may rely on, however the test run itself was started."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servers import EtcdServer, PostgresServer

# A run in the background of a script inherits an ignored Ctrl-C, and would hand that down to every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that any user may enter, with a short path."""
    path = Path(tempfile.mkdtemp(prefix="crater-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for all tests of this process; each test takes a database of its own, and none stops the server."""
    from servers import PostgresServer

    server = PostgresServer().start()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """One server for all tests of this process; each test takes a prefix of its own, and none stops the server."""
    from servers import EtcdServer

    server = EtcdServer().start()
    yield server
    server.remove()
