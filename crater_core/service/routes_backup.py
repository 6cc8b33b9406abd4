"""The whole store as a file, while it is in use; and what decisions see, without secrets, for a report."""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from typing import IO, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from crater_core.model.snapshot import still_of
from crater_core.service.http import Hub, identity_of
from crater_core.service.openapi import described
from crater_core.store.backup import write_backup
from crater_core.store.protocol import PortableStore
from crater_core.store.snapshot_file import write_snapshot

_CHUNK_BYTES = 256 * 1024
_IN_MEMORY_BYTES = 16 * 1024**2


class BackupRoutes:
    def __init__(self, hub: Hub) -> None:
        self._engine = hub.engine

    def router(self) -> APIRouter:
        router = APIRouter(tags=["cluster"])
        about = described("Everything that the store holds, for `crater restore`", "application/gzip")
        router.add_api_route("/v1/backup", self.backup, methods=["GET"], **about)
        about = described("What decisions see now, without secrets, for `crater debug replay`", "application/gzip")
        router.add_api_route("/v1/snapshot", self.snapshot, methods=["GET"], **about)
        return router

    async def snapshot(self, request: Request) -> Response:
        identity_of(request).must_be_admin()
        engine = self._engine
        data: bytes = await engine.read(write_snapshot, still_of(engine.shown.snapshot), engine.clock.now_ms())
        return Response(data, media_type="application/gzip")

    async def backup(self, request: Request) -> Response:
        identity_of(request).must_be_admin()
        file = await self._engine.read(self._written)
        return StreamingResponse(_chunks(file), media_type="application/gzip")

    def _written(self) -> IO[bytes]:
        file = tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
        try:
            write_backup(cast(PortableStore, self._engine.store), file)
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file


def _chunks(file: IO[bytes]) -> Generator[bytes]:
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
