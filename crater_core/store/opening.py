"""Opens the store that a URL names: sqlite:///PATH, postgresql://USER@HOST/NAME, or etcd+http://HOST:2379,...#PREFIX."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from crater_core.errors import BadConfiguration
from crater_core.store.etcd_access import EtcdAccess, access_from
from crater_core.store.protocol import PortableStore
from crater_core.store.sqlite import SqliteStore


def open_store(url: str, access: EtcdAccess | None = None) -> PortableStore:
    """`access` is for etcd; without it the environment says how.

    Raises StoreUnavailable, or BadConfiguration when the URL or the installation does not fit.
    """
    if url.startswith("sqlite:///"):
        return SqliteStore(Path(url.removeprefix("sqlite:///")))
    if url.startswith(("postgresql://", "postgres://")):
        try:
            from crater_core.store.postgres import PostgresStore
        except ImportError as error:
            raise _not_installed("PostgreSQL", "postgres", error) from error
        return PostgresStore(url)
    if url.startswith("etcd+"):
        try:
            from crater_core.store.etcd import EtcdStore
        except ImportError as error:
            raise _not_installed("etcd", "etcd", error) from error
        endpoints, _, prefix = url.removeprefix("etcd+").partition("#")
        return EtcdStore(endpoints.split(","), prefix or "/crater/", access or access_from(os.environ))
    raise BadConfiguration(f"no store can be opened at {shown(url)}; expected sqlite:///, postgresql:// or etcd+http://")


def shown(url: str) -> str:
    """The URL as people may see it: without a password."""
    if url.startswith("sqlite:///"):
        return url.removeprefix("sqlite:///")
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url.partition("?")[0]
    user, _, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{user.partition(':')[0]}@{host}{parts.path}"


def _not_installed(what: str, extra: str, error: ImportError) -> BadConfiguration:
    return BadConfiguration(f"{what} as the store needs more packages: pip install 'crater-dagster[{extra}]' ({error})")
