"""The client's only door to httpx: one attempt over the network, sync or async, with connections that open when first needed.

Proxies from the environment are not used: a scheduler is an address of one's own network. A forked child never touches its
parent's connections.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from typing import Any

import httpx

from crater_core.client.calls import Answer
from crater_core.client.sending import Attempt, Failure
from crater_core.client.settings import Connection

CONNECT_S = 5.0
KEEP_S = 60.0
"""Less than the scheduler keeps an idle connection open."""
Broken = httpx.TransportError
"""What reading a streamed answer raises when the connection is lost."""
_left_behind: list[httpx.Client | httpx.AsyncClient] = []
"""Clients of a parent process or an ended loop: closing them would need locks and loops that are not ours."""


def _options(connection: Connection) -> dict[str, Any]:
    secure = any(endpoint.startswith("https:") for endpoint in connection.endpoints)
    return {
        "headers": connection.headers,
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=KEEP_S),
        "verify": ssl.create_default_context() if secure else False,
        "trust_env": False,
        "follow_redirects": False,
    }


def _request(http: httpx.Client | httpx.AsyncClient, attempt: Attempt, timeout_s: float) -> httpx.Request:
    call = attempt.call
    headers = dict(call.headers)
    if call.body is not None:
        headers["Content-Type"] = "application/json"
    timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S), read=timeout_s + call.wait_s)
    url = attempt.endpoint + call.path
    return http.build_request(call.method, url, params=list(call.query), content=call.body, headers=headers, timeout=timeout)


def _failure(error: httpx.TransportError) -> Failure:
    unsent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
    if isinstance(error, httpx.TimeoutException):
        return Failure("it took too long to connect" if unsent else "it took too long to answer", unsent)
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Failure("its certificate is not trusted here (SSL_CERT_FILE names a file of further authorities)", unsent, True)
    why = "connection refused" if "Connection refused" in text or "All connection attempts failed" in text else text
    return Failure(why or type(error).__name__, unsent)


def _answer(response: httpx.Response, content: bytes, stream: bool) -> Answer:
    return Answer(response.status_code, response.headers, content, response if stream else None)


class SyncTransport:
    """Threads may share it. `transport` stands in for the network in tests."""

    def __init__(self, connection: Connection, transport: httpx.BaseTransport | None = None) -> None:
        self._connection, self._transport = connection, transport
        self._http: httpx.Client | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()

    def _client(self) -> httpx.Client:
        if self._pid != os.getpid():
            # The lock may have been held by a thread that the fork left behind, so it is not asked.
            if self._http is not None:
                _left_behind.append(self._http)
            self._http, self._lock, self._pid = None, threading.Lock(), os.getpid()
        with self._lock:
            if self._http is None:
                self._http = httpx.Client(**_options(self._connection), transport=self._transport)
            return self._http

    def exchange(self, attempt: Attempt) -> Answer | Failure:
        http = self._client()
        stream = attempt.call.streams
        try:
            response = http.send(_request(http, attempt, self._connection.timeout_s), stream=stream)
            if stream and response.status_code >= 300:
                response.read()
                stream = False
            return _answer(response, b"" if stream else response.content, stream)
        except httpx.TransportError as error:
            return _failure(error)

    def close(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._pid == os.getpid():
            http.close()


class AsyncTransport:
    """For one event loop at a time: another loop, or a forked child, gets connections of its own."""

    def __init__(self, connection: Connection, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._connection, self._transport = connection, transport
        self._http: httpx.AsyncClient | None = None
        self._owner: tuple[int, asyncio.AbstractEventLoop] | None = None

    def _client(self) -> httpx.AsyncClient:
        owner = (os.getpid(), asyncio.get_running_loop())
        if self._http is None or self._owner != owner:
            if self._http is not None:
                _left_behind.append(self._http)
            self._http = httpx.AsyncClient(**_options(self._connection), transport=self._transport)
            self._owner = owner
        return self._http

    async def exchange(self, attempt: Attempt) -> Answer | Failure:
        http = self._client()
        stream = attempt.call.streams
        try:
            response = await http.send(_request(http, attempt, self._connection.timeout_s), stream=stream)
            if stream and response.status_code >= 300:
                await response.aread()
                stream = False
            return _answer(response, b"" if stream else response.content, stream)
        except httpx.TransportError as error:
            return _failure(error)

    async def close(self) -> None:
        http, self._http = self._http, None
        if http is not None and self._owner == (os.getpid(), asyncio.get_running_loop()):
            await http.aclose()
