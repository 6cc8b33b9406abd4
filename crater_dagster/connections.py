"""A worker keeps its database connections while it writes events, and lets go of them while the user's code runs for hours."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

IDLE_S = 5.0
"""Connections that nobody used for this long are closed: hundreds of long steps must not use up the database's."""


@contextlib.contextmanager
def kept_connections(engines: Sequence[Any], idle_s: float = IDLE_S) -> Iterator[None]:
    """While inside, SQLAlchemy `engines` that keep connections close those that have been idle for `idle_s`."""
    if not engines:
        yield
        return
    over = threading.Event()
    keeper = threading.Thread(target=_close_idle, args=(engines, idle_s, over), name="crater-connections", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def _close_idle(engines: Sequence[Any], idle_s: float, over: threading.Event) -> None:
    from sqlalchemy import event

    used = dict.fromkeys(engines, True)

    def note(engine: Any) -> None:
        def given(*_: Any) -> None:
            used[engine] = True

        event.listen(engine, "checkout", given)
        event.listen(engine, "checkin", given)

    for engine in engines:
        note(engine)
    while not over.wait(idle_s):
        for engine in engines:
            # One that is in use would outlive its pool until the garbage is collected; the next use opens a new one.
            if not used[engine] and not engine.pool.checkedout():
                engine.dispose()
            used[engine] = False
