"""An etcd that lets in only whom it knows, over TLS in both directions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aetcd.rpc
import grpc
import httpx
import pytest
from harness import SchedulerProcess, start_scheduler, wait_until
from servers import EtcdServer

from crater_core.errors import StoreUnavailable
from crater_core.lifecycle.changes import Changes
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.store.etcd import EtcdStore
from crater_core.store.etcd_access import EtcdAccess, read_access

rpc: Any = aetcd.rpc
PASSWORD = "not so secret"


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Guarded:
    server: EtcdServer
    folder: Path
    root: Any
    """A channel, and the words by which root is let in."""
    words: Any

    def as_root(self, method: str, **fields: Any) -> None:
        request = getattr(rpc, f"Auth{method}Request")(**fields)
        getattr(rpc.AuthStub(self.root), method)(request, timeout=10, metadata=self.words)

    @property
    def settings(self) -> dict[str, Any]:
        files = {
            f"{name}_file": str(self.folder / file) for name, file in (("ca", "ca.pem"), ("cert", "us.pem"), ("key", "us.key"))
        }
        return {"user": "crater", "password_file": str(self.folder / "password"), **files}

    @property
    def access(self) -> EtcdAccess:
        return read_access({}, self.settings["user"], *(Path(path) for path in list(self.settings.values())[1:]))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "password").write_text(PASSWORD + "\n")
    (folder / "extra").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl(folder, "req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=a test's own authority")
    for name in ("etcd", "us"):
        openssl(folder, "req", *new[:-2], "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=127.0.0.1")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "extra")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    files = {"--cert-file": "etcd.pem", "--key-file": "etcd.key", "--trusted-ca-file": "ca.pem"}
    arguments = [word for name, file in files.items() for word in (name, str(folder / file))]
    server = EtcdServer("m1", None, *arguments, "--client-cert-auth").start()
    pem = [(folder / file).read_bytes() for file in ("ca.pem", "us.key", "us.pem")]
    channel: Any = grpc.secure_channel(server.url.removeprefix("https://"), grpc.ssl_channel_credentials(*pem))
    opening = Guarded(server, folder, channel, None)
    for user in ("root", "crater"):
        opening.as_root("UserAdd", name=user, password=PASSWORD)
        opening.as_root("RoleAdd", name=user)
        opening.as_root("UserGrantRole", user=user, role=user)
    for prefix in (b"/crater/", b"/other/"):
        whole = rpc.Permission(permType=rpc.Permission.READWRITE, key=prefix, range_end=prefix[:-1] + b"0")
        opening.as_root("RoleGrantPermission", name="crater", perm=whole)
    rpc.AuthStub(channel).AuthEnable(rpc.AuthEnableRequest(), timeout=10)
    token = rpc.AuthStub(channel).Authenticate(rpc.AuthenticateRequest(name="root", password=PASSWORD)).token
    yield replace(opening, words=(("token", token),))
    channel.close()
    server.remove()


def a_task(name: str) -> Task:
    return Task(name, TaskSpec("job", command=("true",)), TaskStatus.QUEUED, 1, 1)


def test_a_scheduler_leads_and_remembers_as_a_user_with_a_certificate(
    guarded: Guarded, tmp_path: Path, own: list[SchedulerProcess]
) -> None:
    settings = {"etcd_endpoints": [guarded.server.url], "etcd": guarded.settings, "leader_lease": "1s"}
    first, second = (start_scheduler(tmp_path / name, **settings) for name in ("a", "b"))
    own += [first, second]
    task = httpx.post(f"{first.url}/v1/tasks", json={"name": "t", "command": ["true"], "resources": {"cpu": 1}}, timeout=20)
    assert task.status_code == 201, task.text
    first.kill()
    wait_until(lambda: httpx.get(f"{second.url}/v1/leader", timeout=5).json()["leading"], 20, "the standby leads")
    assert httpx.get(f"{second.url}/v1/tasks/{task.json()['id']}", timeout=5).json()["status"] == "queued"
    assert PASSWORD not in first.log_text() + second.log_text()


def test_a_token_that_is_over_is_renewed_and_the_write_goes_through(guarded: Guarded) -> None:
    store = EtcdStore([guarded.server.url], "/other/", guarded.access)
    try:
        term = store.campaign("a", "http://a", 60_000).term
        store.commit(Changes((a_task("t1"),)), 0, term)
        guarded.as_root("UserAdd", name="somebody-else", password="x")
        store.commit(Changes((a_task("t2"),)), 1, term)
        store.renew(term)
        assert sorted(entity.id for entity in store.load().entities if isinstance(entity, Task)) == ["t1", "t2"]
        store.resign(term)
    finally:
        store.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"password": "guessed"}, "authentication failed"),
        ({"user": None}, "user name|permission denied"),
        ({"authorities": None}, "cannot be used now"),
        ({"certificate": None, "key": None}, "cannot be used now"),
    ],
)
def test_who_is_not_known_is_refused(guarded: Guarded, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(StoreUnavailable, match=why) as refused:
        EtcdStore([guarded.server.url], "/crater/", replace(guarded.access, **wrong))
    assert "guessed" not in str(refused.value)
    assert PASSWORD not in str(refused.value) + repr(guarded.access)


def test_keys_of_others_are_out_of_reach(guarded: Guarded) -> None:
    with pytest.raises(StoreUnavailable, match="permission denied"):
        EtcdStore([guarded.server.url], "/foreign/", guarded.access)


def test_a_backup_of_a_guarded_store_takes_the_words_of_the_environment(guarded: Guarded, tmp_path: Path) -> None:
    words = {f"CRATER_ETCD_{name.upper()}": path for name, path in guarded.settings.items()}
    command = ["backup", str(tmp_path / "b"), "--store", f"etcd+{guarded.server.url}#/crater/"]
    made = subprocess.run(
        [sys.executable, "-m", "crater_core.cli", *command],
        env={**os.environ, **words},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
