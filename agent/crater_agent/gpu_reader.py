"""Two threads for each card, since NVML may hang: one reads it, the other waits for its events. What they find goes to `tell`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from crater_agent.gpu_reading import Glance, Reading, XidEvent
from crater_agent.nvml import Gpu, Nvml

log = logging.getLogger("crater.agent.gpu")
GLANCE_S = 1.0
EVENT_WAIT_MS = 1_000
AGAIN_S = 5.0
News = Reading | Glance | XidEvent


class CardReader:
    """Of one card with its slices. `tell` is called from its threads, and must hand on what it gets."""

    def __init__(self, door: Nvml, gpus: tuple[Gpu, ...], interval_s: float, tell: Callable[[News], None]) -> None:
        self.card = gpus[0].card
        self.watched = False
        """Something runs on it: it is looked at each second between two readings."""
        self._door, self._gpus, self._interval_s, self._tell = door, gpus, interval_s, tell
        self._since_us = dict.fromkeys((gpu.uuid for gpu in gpus), time.time_ns() // 1000)
        self._most: dict[str, int] = {}
        self._inside_since: float | None = None
        self._soon = threading.Event()
        self._over = False

    def start(self) -> None:
        for name, loop in (("read", self._read), ("events", self._listen)):
            threading.Thread(target=loop, name=f"gpu {name} {self.card[-12:]}", daemon=True).start()

    def stop(self) -> None:
        """Does not wait: a thread that hangs in the driver cannot be ended, and keeps nobody from leaving."""
        self._over = True
        self._soon.set()

    def hurry(self) -> None:
        """Read it now."""
        self._soon.set()

    @property
    def silent_s(self) -> float:
        """How long the driver has owed an answer; 0 while it owes none."""
        since = self._inside_since
        return 0.0 if since is None else time.monotonic() - since

    def _read(self) -> None:
        due = time.monotonic()
        while not self._over:
            try:
                if self._soon.is_set() or time.monotonic() >= due:
                    self._soon.clear()
                    due = time.monotonic() + self._interval_s
                    self._read_all()
                else:
                    self._glance_at_all()
            except Exception:
                # What one card answers must not end the care for it: it counts as silent until it can be read.
                log.exception("reading the GPU %s failed; it is tried again", self.card)
            pause_s = due - time.monotonic()
            self._soon.wait(max(0.0, min(GLANCE_S, pause_s) if self.watched else pause_s))

    def _read_all(self) -> None:
        for gpu in self._gpus:
            self._inside_since = self._inside_since or time.monotonic()
            reading, self._since_us[gpu.uuid] = self._door.read(gpu, self._since_us[gpu.uuid])
            self._inside_since = None
            use, most = reading.glance.use_percent, self._most.pop(gpu.uuid, None)
            self._hand_on(replace(reading, use_percent_max=use if most is None or use is None else max(use, most)))

    def _glance_at_all(self) -> None:
        for gpu in self._gpus:
            self._inside_since = self._inside_since or time.monotonic()
            glance = self._door.glance(gpu.uuid)
            self._inside_since = None
            if glance.use_percent is not None:
                self._most[gpu.uuid] = max(self._most.get(gpu.uuid, 0), glance.use_percent)
            self._hand_on(glance)

    def _listen(self) -> None:
        while not self._over:
            opening = self._door.openings
            try:
                for event in self._door.events_of(self.card, EVENT_WAIT_MS):
                    if self._over:
                        return
                    if event is not None:
                        self._hand_on(event)
            except Exception:
                log.debug("waiting for events of the GPU %s failed", self.card, exc_info=True)
            if not self._over and opening == self._door.openings:
                # It was lost, or has no events: what a reading shows is seen all the same.
                time.sleep(AGAIN_S)

    def _hand_on(self, news: News) -> None:
        if not self._over:
            self._tell(news)
