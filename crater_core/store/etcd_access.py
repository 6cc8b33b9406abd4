"""Who a scheduler is to etcd, and whom it believes: a user with a password, and certificates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crater_core.errors import BadConfiguration

PASSWORD = "CRATER_ETCD_PASSWORD"  # noqa: S105
"""The environment's word for it, where no file has it."""


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Bytes are PEM. Without a user etcd knows a caller by its certificate, or lets everybody in."""

    user: str | None = None
    password: str = field(default="", repr=False)
    authorities: bytes | None = None
    """Whom to believe; None: those of the system."""
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


def read_access(
    environ: Mapping[str, str],
    user: str | None = None,
    password_file: Path | None = None,
    ca_file: Path | None = None,
    cert_file: Path | None = None,
    key_file: Path | None = None,
) -> EtcdAccess:
    """From files. Raises BadConfiguration with the field of one that cannot be read, or is missing beside another."""
    if (cert_file is None) is not (key_file is None):
        given, missing = ("key_file", "cert_file") if cert_file is None else ("cert_file", "key_file")
        raise BadConfiguration(f"etcd.{missing}: found nothing; expected a file beside etcd.{given}")
    password = _read("password_file", password_file).decode().rstrip("\r\n") if password_file else environ.get(PASSWORD, "")
    if user is not None and not password:
        raise BadConfiguration(f"etcd.password_file: found nothing; expected a file with the password of {user}, or {PASSWORD}")
    files = (("ca_file", ca_file), ("cert_file", cert_file), ("key_file", key_file))
    return EtcdAccess(user, password, *(_read(name, file) if file else None for name, file in files))


def access_from(environ: Mapping[str, str]) -> EtcdAccess:
    """For commands, which have no file of settings: CRATER_ETCD_USER, CRATER_ETCD_CA_FILE and so on."""
    names = ("password_file", "ca_file", "cert_file", "key_file")
    files = {name: Path(path) for name in names if (path := environ.get(f"CRATER_ETCD_{name.upper()}"))}
    return read_access(environ, environ.get("CRATER_ETCD_USER") or None, **files)


def _read(name: str, file: Path) -> bytes:
    try:
        return file.expanduser().read_bytes()
    except OSError as error:
        raise BadConfiguration(f"etcd.{name}: found {file}; expected a file that can be read: {error.strerror}") from error
