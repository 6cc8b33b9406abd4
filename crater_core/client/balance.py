"""Calls a service's replicas in turn, and turns to another one when a replica does not answer."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import httpx

from crater_core.client.sync import CraterClient
from crater_core.clock import SystemClock
from crater_core.errors import Unavailable
from crater_core.wire.services import ServiceView

_REPEATABLE = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})
_TRY_ANOTHER = frozenset({502, 503, 504})
FRESH_MS = 2_000
"""How long a list of replicas is good without asking again."""


class Turns:
    """Whose turn it is. Replicas that failed go to the end until the next list. Pure."""

    def __init__(self) -> None:
        self._count = 0

    def order(self, replicas: list[str]) -> list[str]:
        """All replicas, beginning with the next in turn."""
        if not replicas:
            return []
        start = self._count % len(replicas)
        self._count += 1
        return replicas[start:] + replicas[:start]


class ServiceCaller:
    """`caller.request("POST", "/predict", json=...)`: an httpx response from a ready replica. Threads may share it.

    A replica that cannot be reached, or that answers 502, 503 or 504, is passed over. One that breaks off in the middle is
    passed over too when the call may be made twice: GET, HEAD, OPTIONS, PUT, DELETE, and all with `repeatable=True`. With no
    replica ready for `patience_s`, Unavailable is raised with what holds them up. The scheduler's token is never sent.
    """

    def __init__(
        self, client: CraterClient, name: str, *, timeout_s: float = 30.0, patience_s: float = 10.0, repeatable: bool = False
    ) -> None:
        self.name = name
        self._client, self._repeatable, self._patience_ms = client, repeatable, round(patience_s * 1000)
        self._timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 3.0))
        self._turns, self._lock, self._clock = Turns(), threading.Lock(), SystemClock()
        self._known: ServiceView | None = None
        self._known_at_ms = 0
        self._http: httpx.Client | None = None

    def __enter__(self) -> ServiceCaller:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        http, self._http = self._http, None
        if http is not None:
            http.close()

    def replicas(self, fresh: bool = True) -> list[str]:
        """Addresses of the ready replicas, as http://HOST:PORT."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            if fresh or self._known is None or now_ms - self._known_at_ms > FRESH_MS:
                self._known, self._known_at_ms = self._client.service(self.name), now_ms
            return [replica.url for replica in self._known.replica_list if replica.ready and replica.url is not None]

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """`options` are httpx's: `json`, `content`, `params`, `headers`, `files`, `timeout`."""
        until_ms = self._clock.monotonic_ms() + self._patience_ms
        why = "no replica is ready"
        fresh = False
        pause_ms = 50
        while True:
            for replica in self._turns.order(self.replicas(fresh)):
                outcome = self._try(method.upper(), replica + path, options)
                if isinstance(outcome, httpx.Response):
                    return outcome
                why = outcome
            if self._clock.monotonic_ms() + pause_ms > until_ms:
                raise Unavailable(f"service {self.name} did not answer: {why}{self._held_up()}", service=self.name, reason=why)
            threading.Event().wait(pause_ms / 1000)
            fresh, pause_ms = True, min(1_000, pause_ms * 2)

    def _try(self, method: str, url: str, options: dict[str, Any]) -> httpx.Response | str:
        """The response, or why another replica should be asked."""
        try:
            response = self._opened().request(method, url, **options)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return f"{url} cannot be reached ({error or type(error).__name__})"
        except httpx.TransportError as error:
            if self._repeatable or method in _REPEATABLE:
                return f"{url} broke off ({str(error) or type(error).__name__})"
            raise Unavailable(
                f"{url} broke off while it answered ({str(error) or type(error).__name__}); "
                "it is not sent again because it may have taken effect (repeatable=True allows it)",
                service=self.name,
            ) from error
        if response.status_code in _TRY_ANOTHER:
            return f"{url} answered HTTP {response.status_code}"
        return response

    def _opened(self) -> httpx.Client:
        with self._lock:
            if self._http is None:
                self._http = httpx.Client(timeout=self._timeout, trust_env=False)
            return self._http

    def _held_up(self) -> str:
        known = self._known
        if known is None:
            return ""
        reasons = [f"{r.task} is {r.status}: {r.reason.message}" for r in known.replica_list if not r.ready and r.reason]
        return f" ({known.ready} of {known.replicas} ready{'; ' if reasons else ''}{'; '.join(reasons[:3])})"
