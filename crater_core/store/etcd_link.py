"""The one door to etcd: aetcd's messages over blocking gRPC, on whichever of several endpoints answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
import aetcd.rpc
import grpc

from crater_core.errors import StoreUnavailable
from crater_core.store.etcd_access import EtcdAccess

rpc: Any = aetcd.rpc
CALL_S = 3.0
"""How long one endpoint may take for one call: several elections of etcd's own."""
PAGE = 2_000
_NEW_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""What etcd says of a token that has been good, and of none where users have just been asked for. Nothing was done."""
_ELSEWHERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
]


@dataclass(frozen=True, slots=True)
class Found:
    key: bytes
    value: bytes
    created: int
    changed: int
    lease: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a transaction: whether its conditions held, etcd's revision, and what its reads found."""

    held: bool
    revision: int
    found: list[Found | None]


def created_at(key: bytes, revision: int) -> Any:
    return rpc.Compare(target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, key=key, create_revision=revision)


def changed_at(key: bytes, revision: int) -> Any:
    return rpc.Compare(target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, key=key, mod_revision=revision)


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes, end: bytes = b"") -> Any:
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key, range_end=end))


def get(key: bytes) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def after_prefix(prefix: bytes) -> bytes:
    """The end of the range of all keys with this prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class EtcdLink:
    """Calls go to the endpoint that answered last. Threads may share it. Raises StoreUnavailable when none answers."""

    def __init__(self, endpoints: Sequence[str], access: EtcdAccess | None = None) -> None:
        self._endpoints = list(endpoints)
        self._access = access or EtcdAccess()
        self._channels: list[Any] = [_channel(endpoint, self._access) for endpoint in endpoints]
        self._at = 0
        self._token: str | None = None

    def txn(self, conditions: Sequence[Any], then: Sequence[Any], otherwise: Sequence[Any] = ()) -> Outcome:
        request = rpc.TxnRequest(compare=conditions, success=then, failure=otherwise)
        answer = self._call(lambda channel: rpc.KVStub(channel).Txn, request)
        found: list[Found | None] = []
        for response in answer.responses:
            if response.WhichOneof("response") == "response_range":
                kvs = response.response_range.kvs
                found.append(_found(kvs[0]) if kvs else None)
        return Outcome(bool(answer.succeeded), int(answer.header.revision), found)

    def get(self, *keys: bytes) -> list[Found | None]:
        """All of one moment."""
        return self.txn((), [get(key) for key in keys]).found

    def scan(self, start: bytes, end: bytes, revision: int = 0, limit: int = 0) -> Iterator[Found]:
        """A range in the order of its keys, all of one moment: that of `revision`, or of the first page."""
        left = limit
        while True:
            page = min(PAGE, left) if limit else PAGE
            request = rpc.RangeRequest(key=start, range_end=end, revision=revision, limit=page)
            answer = self._call(lambda channel: rpc.KVStub(channel).Range, request)
            revision = revision or int(answer.header.revision)
            for kv in answer.kvs:
                yield _found(kv)
            left -= len(answer.kvs)
            if not answer.more or (limit and left <= 0):
                return
            start = bytes(answer.kvs[-1].key) + b"\0"

    def compact(self, revision: int) -> None:
        """Let etcd forget its own old versions of all keys."""
        self._call(lambda channel: rpc.KVStub(channel).Compact, rpc.CompactionRequest(revision=revision))

    def grant(self, seconds: int) -> int:
        return int(self._call(lambda channel: rpc.LeaseStub(channel).LeaseGrant, rpc.LeaseGrantRequest(TTL=seconds)).ID)

    def revoke(self, lease: int) -> None:
        self._call(lambda channel: rpc.LeaseStub(channel).LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease))

    def keep_alive(self, lease: int) -> int:
        """The seconds that the lease has now; 0 when it is over."""

        def call(channel: Any) -> Callable[..., Any]:
            def once(request: Any, **how: Any) -> Any:
                return next(rpc.LeaseStub(channel).LeaseKeepAlive(iter([request]), **how))

            return once

        return int(self._call(call, rpc.LeaseKeepAliveRequest(ID=lease)).TTL)

    def seconds_left(self, lease: int) -> int:
        request = rpc.LeaseTimeToLiveRequest(ID=lease)
        return int(self._call(lambda channel: rpc.LeaseStub(channel).LeaseTimeToLive, request).TTL)

    def watch(self, prefix: bytes, on_change: Callable[[], None], ended: threading.Event) -> None:
        """Call `on_change` at every change of a key with the prefix, and at every break of the line, until `ended`."""
        while not ended.is_set():
            create = rpc.WatchCreateRequest(key=prefix, range_end=after_prefix(prefix))
            closing = threading.Event()

            def requests(create: Any = create, closing: threading.Event = closing) -> Iterator[Any]:
                yield rpc.WatchRequest(create_request=create)
                closing.wait()  # The stream lasts as long as this side of it is open.

            try:
                channel = self._channels[self._at]
                call = rpc.WatchStub(channel).Watch(requests(), metadata=self._words(channel))
                threading.Thread(target=_cancel_when, args=(ended, closing, call), daemon=True).start()
                for _ in call:
                    on_change()
            except grpc.RpcError as error:
                self._forget_token(error)
            except ValueError:  # A channel that is closed.
                pass
            finally:
                closing.set()
            on_change()
            ended.wait(0.5)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _call(self, method: Callable[[Any], Callable[..., Any]], request: Any) -> Any:
        why = ""
        for _ in range(len(self._endpoints) + 1):  # Each once, and one more for a token that is over.
            at = self._at
            try:
                channel = self._channels[at]
                return method(channel)(request, timeout=CALL_S, metadata=self._words(channel))
            except grpc.RpcError as error:
                call = cast(Any, error)
                why = f"{self._endpoints[at]}: {call.details() or call.code().name}"
                if self._forget_token(error):
                    continue
                if call.code() not in _ELSEWHERE:
                    break
                self._at = (at + 1) % len(self._endpoints)
            except (ValueError, StopIteration) as error:  # A channel that is closed, a stream that ended at once.
                why = f"{self._endpoints[at]}: {error or 'no answer'}"
                break
        raise StoreUnavailable(f"etcd cannot be used now: {why}", store=", ".join(self._endpoints), reason=why)

    def _words(self, channel: Any) -> tuple[tuple[str, str], ...] | None:
        """What a call carries to be let in."""
        if self._access.user is None:
            return None
        if self._token is None:
            asked = rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
            self._token = str(rpc.AuthStub(channel).Authenticate(asked, timeout=CALL_S).token)
        return (("token", self._token),)

    def _forget_token(self, error: grpc.RpcError) -> bool:
        """Whether the call may go through with another one."""
        details = cast(Any, error).details() or ""
        over = self._access.user is not None and any(text in details for text in _NEW_TOKEN)
        if over:
            self._token = None
        return over


def _cancel_when(ended: threading.Event, closing: threading.Event, call: Any) -> None:
    while not closing.wait(0.2):
        if ended.is_set():
            call.cancel()
            return


def _channel(endpoint: str, access: EtcdAccess) -> Any:
    scheme, _, address = endpoint.partition("://")
    if scheme == "https":
        credentials = grpc.ssl_channel_credentials(access.authorities, access.key, access.certificate)
        return grpc.secure_channel(address, credentials, options=_OPTIONS)
    return grpc.insecure_channel(address, options=_OPTIONS)


def _found(kv: Any) -> Found:
    return Found(bytes(kv.key), bytes(kv.value), int(kv.create_revision), int(kv.mod_revision), int(kv.lease))
