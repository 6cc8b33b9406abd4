"""Output that is carried on after a break has every piece once, wherever the break was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from crater_agent.docker_output import Follower
from crater_core.errors import RuntimeFailed

PIECES = [
    ("2026-01-01T00:00:00.000000001Z", b"one\n"),
    ("2026-01-01T00:00:00.000000002Z", b"two "),
    ("2026-01-01T00:00:00.000000002Z", b"three\n"),
    ("2026-01-01T00:00:01.500000000Z", b"four\n"),
    ("2026-01-01T00:00:02.000000000Z", b"five\n"),
]


def _follow(tmp_path: Path, pieces: list[tuple[str, bytes]], fail_after: int | None = None) -> None:
    """One agent's life: it reads up to `fail_after` pieces, then is gone."""

    async def run() -> None:
        def read(since_s: int) -> Iterator[tuple[str, bytes]]:
            for number, piece in enumerate(piece for piece in pieces if _seconds(piece[0]) >= since_s):
                if number == fail_after:
                    follower.given_up.set()
                    raise RuntimeFailed("the engine is gone")
                yield piece

        follower = Follower("c", read, tmp_path / "stdout", tmp_path / "stdout.position", lambda: False)
        follower.start()
        await follower.finished.wait()
        follower.join()

    asyncio.run(run())


def _seconds(moment: str) -> int:
    return 1767225600 + int(moment[17:19])


@pytest.mark.parametrize("break_after", range(len(PIECES)))
@pytest.mark.parametrize("second_break", range(1, len(PIECES)))
def test_every_piece_is_there_once(tmp_path: Path, break_after: int, second_break: int):
    _follow(tmp_path, PIECES, break_after)
    _follow(tmp_path, PIECES, second_break)
    _follow(tmp_path, PIECES)
    assert (tmp_path / "stdout").read_bytes() == b"one\ntwo three\nfour\nfive\n"


def test_what_the_engine_has_dropped_meanwhile_costs_nothing_that_follows(tmp_path: Path):
    _follow(tmp_path, PIECES, 2)
    _follow(tmp_path, PIECES[3:])
    assert (tmp_path / "stdout").read_bytes() == b"one\ntwo four\nfive\n"
