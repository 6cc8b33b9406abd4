"""Where the scheduler is and who is calling: from arguments, or from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from crater_core.errors import BadConfiguration

DEFAULT_ENDPOINT = "http://127.0.0.1:8080"
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


@dataclass(frozen=True, slots=True)
class Connection:
    """Checked settings of a client. The token never shows."""

    endpoints: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    user: str | None = None
    timeout_s: float = 10.0
    retry_for_s: float = 30.0

    @property
    def headers(self) -> dict[str, str]:
        found = {"Accept": "application/json"}
        if self.token is not None:
            found["Authorization"] = f"Bearer {self.token}"
        if self.user is not None:
            found["Crater-User"] = self.user
        return found


def connection(
    endpoints: str | Sequence[str] | None,
    token: str | None,
    user: str | None = None,
    timeout_s: float = 10.0,
    retry_for_s: float = 30.0,
) -> Connection:
    """Raises BadConfiguration with the field at fault."""
    if user is not None and not (0 < len(user) <= 100 and user.isascii() and user.isprintable()):
        raise BadConfiguration("user must have 1 to 100 printable ASCII characters", field="user", found=user)
    if token is not None and not _TOKEN.fullmatch(token):
        raise BadConfiguration("token holds characters that no token has; was it read from the right place?", field="token")
    for name, seconds in (("timeout_s", timeout_s), ("retry_for_s", retry_for_s)):
        if not 0 <= seconds <= 86_400 or (name == "timeout_s" and seconds == 0):
            raise BadConfiguration(f"{name} must be a number of seconds, found {seconds!r}", field=name, found=seconds)
    return Connection(_endpoints(endpoints), token, user, timeout_s, retry_for_s)


def endpoint_from_env(environ: Mapping[str, str] | None = None) -> str:
    """CRATER_ENDPOINT (one, or several with commas), else this machine's own scheduler."""
    environ = os.environ if environ is None else environ
    return environ.get("CRATER_ENDPOINT", "").strip() or DEFAULT_ENDPOINT


def token_from_env(environ: Mapping[str, str] | None = None) -> str | None:
    """CRATER_TOKEN, else what is in the file that CRATER_TOKEN_FILE names, else none."""
    environ = os.environ if environ is None else environ
    token = environ.get("CRATER_TOKEN", "").strip()
    path = environ.get("CRATER_TOKEN_FILE", "").strip()
    if token or not path:
        return token or None
    try:
        return Path(path).expanduser().read_text("utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfiguration(f"CRATER_TOKEN_FILE cannot be read: {error}", field="CRATER_TOKEN_FILE", found=path) from None


def _endpoints(given: str | Sequence[str] | None) -> tuple[str, ...]:
    listed = (given or DEFAULT_ENDPOINT).split(",") if given is None or isinstance(given, str) else list(given)
    found = tuple(dict.fromkeys(checked_endpoint(one) for one in listed if one.strip()))
    if not found:
        raise BadConfiguration("endpoint is missing: the scheduler's address, as http://HOST:8080", field="endpoint")
    return found


def checked_endpoint(text: str) -> str:
    """`http://HOST:PORT` without a slash at the end; `HOST:PORT` is taken as http."""
    address = text.strip()
    address = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urlsplit(address)
        right = parts.scheme in ("http", "https") and _HOST.fullmatch(parts.hostname or "") and parts.port != 0
    except ValueError:
        right, parts = False, urlsplit("")
    if not right or parts.query or parts.fragment or parts.username is not None or not address.isascii() or " " in address:
        raise BadConfiguration(
            f"endpoint must be like http://HOST:8080 or https://HOST:8443, found {text[:200]!r}",
            field="endpoint",
            found=text[:200],
        )
    return address
