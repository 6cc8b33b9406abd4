"""The agent's line to the scheduler: httpx calls on one of several endpoints, with what a failure proves told apart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, cast

from crater_agent.outbound import httpx
from crater_core.errors import CraterError, NotLeader, SchedulerUnreachable, Unavailable
from crater_core.wire.agents import (
    DrainAnswer,
    DrainAsked,
    Heartbeat,
    HeartbeatAnswer,
    Leases,
    NodeDeclaration,
    Registered,
    ReportAnswer,
    ReportBatch,
)
from crater_core.wire.problems import error_of

CONNECT_TIMEOUT_S = 3.0


class Link:
    """Calls go to the endpoint that answered last. SchedulerUnreachable has a field `proof`: True when every endpoint
    refused, so that surely nobody gives this node's work away; False when somebody was merely silent."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        token: str | None,
        node: str,
        transport: httpx.AsyncBaseTransport | None = None,
        refused: Callable[[httpx.URL], Awaitable[bool]] | None = None,
    ) -> None:
        """`transport` and `refused` (whether a URL's host refuses) are the network; others than the real one are simulated."""
        self._endpoints = list(endpoints)
        self._at = 0
        self.node = node
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Reading the certificates of the world costs memory that an agent on plain HTTP need not spend.
        secure = any(endpoint.startswith("https://") for endpoint in endpoints)
        verify = ssl.create_default_context() if secure else False
        # No proxy from the environment: the scheduler is named by its own address.
        timeout = httpx.Timeout(10, connect=CONNECT_TIMEOUT_S)
        self._client = httpx.AsyncClient(headers=headers, trust_env=False, verify=verify, timeout=timeout, transport=transport)
        self._refused = refused or is_refused

    @property
    def endpoint(self) -> str:
        return self._endpoints[self._at]

    async def register(self, declaration: NodeDeclaration) -> Registered:
        answer = await self._call("POST", "register", content=declaration.model_dump_json(), timeout_s=10)
        return Registered.model_validate_json(answer)

    async def leases(self, after: int | None, wait_s: int) -> Leases:
        params = {} if after is None else {"after": str(after), "wait": str(wait_s)}
        return Leases.model_validate_json(await self._call("GET", "leases", params=params, timeout_s=wait_s + 10))

    async def report(self, batch: ReportBatch) -> ReportAnswer:
        content = batch.model_dump_json(exclude_defaults=True)
        return ReportAnswer.model_validate_json(await self._call("POST", "reports", content=content, timeout_s=10))

    async def heartbeat(self, beat: Heartbeat, timeout_s: float) -> HeartbeatAnswer:
        content = beat.model_dump_json()
        return HeartbeatAnswer.model_validate_json(await self._call("POST", "heartbeat", content=content, timeout_s=timeout_s))

    async def drain(self, reason: str) -> DrainAnswer:
        content = DrainAsked(reason=reason).model_dump_json()
        return DrainAnswer.model_validate_json(await self._call("POST", "drain", content=content, timeout_s=10))

    async def draining(self) -> DrainAnswer:
        return DrainAnswer.model_validate_json(await self._call("GET", "drain", timeout_s=10))

    async def undrain(self) -> DrainAnswer:
        return DrainAnswer.model_validate_json(await self._call("POST", "undrain", timeout_s=10))

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(
        self, method: str, what: str, *, content: str | None = None, params: dict[str, str] | None = None, timeout_s: float
    ) -> bytes:
        proofs: dict[str, bool] = {}
        why = ""
        # Each endpoint once, and one more for a leader that we are sent to.
        for _ in range(len(self._endpoints) + 1):
            url = f"{self.endpoint}/v1/agents/{self.node}/{what}"
            try:
                return await self._once(method, url, content, params, timeout_s)
            except NotLeader as error:
                why, proofs[self.endpoint] = error.message, True
                leader = str(error.fields.get("leader") or "").rstrip("/")
                # Only by the same kind of connection: the token must not leave an encrypted one.
                if leader.partition(":")[0] == self.endpoint.partition(":")[0] and leader != self.endpoint:
                    self._go_to(leader)
                    continue
            except SchedulerUnreachable as error:
                why, proofs[self.endpoint] = error.message, bool(error.fields.get("proof"))
                if error.fields.get("asked"):
                    # It took the question and did not answer: asking others now would only add to the silence.
                    self._next()
                    break
            except Unavailable as error:
                # It cannot write now, so it cannot give this node's work away either.
                why, proofs[self.endpoint] = error.message, True
            self._next()
        raise SchedulerUnreachable(why, proof=all(proofs.get(endpoint, False) for endpoint in self._endpoints))

    def _next(self) -> None:
        self._at = (self._at + 1) % len(self._endpoints)

    def _go_to(self, leader: str) -> None:
        if leader not in self._endpoints:
            self._endpoints.append(leader)
        self._at = self._endpoints.index(leader)

    async def _once(self, method: str, url: str, content: str | None, params: dict[str, str] | None, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            answer = await self._client.request(method, url, content=content, params=params, headers=headers, timeout=timeout)
        except httpx.ConnectError as error:
            refused = await self._refused(httpx.URL(url))
            raise SchedulerUnreachable(f"{url}: {error}", proof=refused) from None
        except httpx.TransportError as error:
            asked = not isinstance(error, httpx.ConnectTimeout | httpx.RemoteProtocolError | httpx.ReadError)
            raise SchedulerUnreachable(f"{url}: {type(error).__name__} {error}", proof=False, asked=asked) from None
        if answer.is_success:
            return answer.content
        raise _problem(answer)


def _problem(answer: httpx.Response) -> CraterError:
    body: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        parsed: object = answer.json()
        if isinstance(parsed, dict):
            body = cast("dict[str, Any]", parsed)
    return error_of(answer.status_code, body)


async def is_refused(url: httpx.URL) -> bool:
    """Whether every address of the URL's host actively refuses a connection: nothing listens there now."""
    loop = asyncio.get_running_loop()
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        addresses = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setblocking(False)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await loop.sock_connect(probe, address)
            except ConnectionRefusedError:
                continue
            except (OSError, TimeoutError):
                return False
            return False
    return bool(addresses)
