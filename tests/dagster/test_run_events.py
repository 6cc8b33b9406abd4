"""Every event of a run is handed out once, whatever the order in which a database shows them."""

from __future__ import annotations

from collections.abc import Collection

from dagster import DagsterEvent, DagsterEventType
from hypothesis import given
from hypothesis import strategies as st

from crater_dagster._dagster import EngineEventData
from crater_dagster.run_events import OVERLAP, RunEvents


class _Log:
    """Numbered events that can be seen once they have been `shown`."""

    def __init__(self) -> None:
        self.shown: set[int] = set()
        self.asked: list[int] = []
        """How many rows each question gave."""

    def fetch(self, number: int, known: Collection[int], limit: int) -> list[tuple[int, DagsterEvent]]:
        rows = sorted(seen for seen in self.shown if seen > number and seen not in known)[:limit]
        self.asked.append(len(rows))
        kind, data = DagsterEventType.ENGINE_EVENT.value, EngineEventData({})
        return [(row, DagsterEvent(kind, "job", message=str(row), event_specific_data=data)) for row in rows]


def _numbers(events: list[DagsterEvent]) -> list[int]:
    return [int(event.message or "") for event in events]


def test_all_pages_of_a_long_log_are_read_at_once():
    log = _Log()
    log.shown.update(range(1, 26))
    events = RunEvents(log.fetch, in_turn=True, page=10)
    assert _numbers(events.new()) == list(range(1, 26))
    assert (events.new(), log.asked) == ([], [10, 10, 5, 0])


@given(late=st.lists(st.integers(0, OVERLAP - 1), min_size=1, max_size=60), page=st.integers(1, 70), every=st.integers(1, 20))
def test_an_event_that_is_seen_late_is_handed_out_once(late: list[int], page: int, every: int):
    """The event with number n is seen once the one with number n + late[n] has been."""
    log, got = _Log(), list[int]()
    events = RunEvents(log.fetch, in_turn=False, page=page)
    for step, number in enumerate(sorted(range(len(late)), key=lambda n: (n + late[n], n))):
        log.shown.add(number)
        if step % every == 0:
            got += _numbers(events.new())
    got += _numbers(events.new())
    assert sorted(got) == list(range(len(late)))


def test_where_events_are_seen_in_turn_nothing_is_asked_for_again():
    log = _Log()
    events = RunEvents(log.fetch, in_turn=True)
    log.shown.add(7)
    assert _numbers(events.new()) == [7]
    log.shown.update({6, 8})
    assert _numbers(events.new()) == [8]
