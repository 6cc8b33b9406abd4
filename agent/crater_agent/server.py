"""The agent's own port: metrics, health, and log reads for the scheduler. Plain asyncio; it answers GET and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from crater_agent.logs import CHUNK_BYTES_MAX, read_log
from crater_agent.records import Records
from crater_core.errors import CraterError, InvalidRequest, NotFound, Unauthenticated
from crater_core.wire.problems import problem_of, status_of

log = logging.getLogger("crater.agent.server")
HEAD_BYTES_MAX = 16 * 1024
HEAD_TIMEOUT_S = 10.0
_WORDS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 500: "Server Error"}


@dataclass(frozen=True, slots=True)
class Ask:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    content: bytes
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=lambda: {})


class Server:
    def __init__(
        self, records: Records, secret: str, metrics: Callable[[], tuple[bytes, str]], health: Callable[[], dict[str, object]]
    ) -> None:
        self._records = records
        self._secret = secret
        self._metrics = metrics
        self._health = health
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """The port it listens on; with port 0 a free one."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            # Kept open: whoever follows a log asks again and again.
            while (ask := await self._read(reader)) is not None:
                answer = await self._guarded(ask)
                writer.write(_encode(answer))
                await writer.drain()
                if ask.headers.get("connection", "").lower() == "close":
                    break
        except (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> Ask | None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        lines = head.decode("latin-1").split("\r\n")
        method, _, rest = lines[0].partition(" ")
        target = urlsplit(rest.rpartition(" ")[0] or rest)
        pairs = [line.partition(":") for line in lines[1:] if line]
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        query = {name: values[-1] for name, values in parse_qs(target.query, keep_blank_values=True).items()}
        return Ask(method, unquote(target.path), query, headers)

    async def _guarded(self, ask: Ask) -> Answer:
        try:
            if ask.method != "GET":
                return Answer(405, b'{"detail": "only GET"}', headers={"Allow": "GET"})
            return await self._route(ask)
        except CraterError as error:
            return Answer(status_of(error), json.dumps(problem_of(error)).encode(), "application/problem+json")
        except Exception:
            log.exception("answering %s failed", ask.path)
            return Answer(500, b'{"detail": "the agent could not answer; see its log"}')

    def _route(self, ask: Ask) -> Awaitable[Answer]:
        if ask.path == "/metrics":
            return self._answer_metrics()
        if ask.path == "/health":
            return self._answer_health()
        if ask.path.startswith("/logs/"):
            return self._answer_logs(ask)
        raise NotFound(f"no such path: {ask.path[:200]}")

    async def _answer_metrics(self) -> Answer:
        content, kind = self._metrics()
        return Answer(200, content, kind)

    async def _answer_health(self) -> Answer:
        return Answer(200, json.dumps(self._health()).encode())

    async def _answer_logs(self, ask: Ask) -> Answer:
        shown = ask.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(shown.encode(), self._secret.encode()):
            raise Unauthenticated("log reads need the secret that this agent gave to its scheduler")
        stream = ask.query.get("stream", "stdout")
        if stream not in ("stdout", "stderr"):
            raise InvalidRequest("stream is stdout or stderr", field="stream", found=stream[:40])
        part = await read_log(
            self._records,
            ask.path.removeprefix("/logs/"),
            stream,
            _whole(ask, "offset", 0),
            _whole(ask, "limit", CHUNK_BYTES_MAX),
            _seconds(ask, "wait"),
        )
        headers = {"Crater-Next-Offset": str(part.next_offset), "Crater-Complete": "true" if part.complete else "false"}
        return Answer(200, part.content, "application/octet-stream", headers)


def _whole(ask: Ask, name: str, default: int) -> int:
    text = ask.query.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest(f"{name} must be a whole number from 0, found {text[:40]!r}", field=name, found=text[:40])
    return int(text)


def _seconds(ask: Ask, name: str) -> float:
    text = ask.query.get(name, "") or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise InvalidRequest(f"{name} must be seconds from 0, found {text[:40]!r}", field=name, found=text[:40])
    return seconds


def _encode(answer: Answer) -> bytes:
    head = [f"HTTP/1.1 {answer.status} {_WORDS.get(answer.status, 'Error')}", f"Content-Type: {answer.kind}"]
    head += [f"Content-Length: {len(answer.content)}", *(f"{name}: {value}" for name, value in answer.headers.items())]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + answer.content
