"""Whose fault an Xid is, what a reading shows, and when a device is given out again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from crater_agent.gpu_faults import Fault, Whose, of_reading, of_xid, throttling, whose, xid_text
from crater_agent.gpu_quarantine import FORGOTTEN_MS, Quarantine, looked_at, struck
from crater_agent.gpu_reading import Glance, Reading

WELL = Reading(Glance("GPU-a", 0, 100, ()), ecc_uncorrected=0, remap_pending=False, remap_failed=False, recovery=0)
ECC = Fault("ecc", "errors")
FOREIGN = Fault("foreign", "somebody")
WELL_FOR_MS = 60_000


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (13, Whose.PROGRAM),
        (31, Whose.PROGRAM),
        (48, Whose.CARD),
        (79, Whose.CARD),
        (63, Whose.CARD_LATER),
        (999, Whose.CARD_LATER),
    ],
)
def test_an_xid_is_a_programs_fault_or_the_cards(number: int, kind: Whose):
    assert whose(number) is kind
    fault = of_xid(number)
    assert (fault is None, fault is not None and fault.stops) == (kind is Whose.PROGRAM, kind is Whose.CARD)


def test_an_xid_is_told_in_words():
    assert (xid_text(79), xid_text(999)) == ("Xid 79 (GPU has fallen off the bus)", "Xid 999")


@pytest.mark.parametrize(
    ("fields", "codes"),
    [
        ({}, []),
        ({"ecc_uncorrected": 1}, ["ecc"]),
        ({"remap_pending": True}, ["remap_pending"]),
        ({"remap_pending": True, "remap_failed": True}, ["remap_failed"]),
        ({"retirement_pending": True}, ["retirement_pending"]),
        ({"recovery": 4}, ["recovery"]),
        ({"ecc_uncorrected": None, "recovery": None, "remap_failed": None}, []),
        ({"glance": Glance("GPU-a", error="GPU is lost"), "ecc_uncorrected": 5}, ["lost"]),
    ],
)
def test_a_reading_shows_what_is_wrong(fields: dict[str, object], codes: list[str]):
    assert [fault.code for fault in of_reading(replace(WELL, **fields))] == codes  # type: ignore[arg-type]


def test_only_a_lost_card_ends_what_runs_there_by_a_reading():
    bad = replace(WELL, ecc_uncorrected=9, remap_failed=True, retirement_pending=True, recovery=2)
    assert not any(fault.stops for fault in of_reading(bad))
    assert of_reading(replace(WELL, glance=Glance("GPU-a", error="GPU is lost")))[0].stops


def test_what_the_operator_ignores_is_no_fault():
    assert of_reading(replace(WELL, ecc_uncorrected=1), ignored=("ecc",)) == ()


def test_an_idle_card_and_clocks_that_were_set_are_not_throttled():
    assert throttling(0x01 | 0x02 | 0x10 | 0x100) == frozenset()
    assert throttling(0x44) == {"power_cap", "hardware_thermal"}
    assert throttling(None) == frozenset()


# ---- quarantine


def test_a_fault_counts_until_the_device_was_well_for_long_enough():
    state = looked_at(Quarantine(), [ECC], 1_000, WELL_FOR_MS)
    assert (state.faults, state.since_ms) == ((ECC,), 1_000)
    state = looked_at(state, [], 30_000, WELL_FOR_MS)
    assert state.why == "errors"
    assert looked_at(state, [], 60_999, WELL_FOR_MS).faults == (ECC,)
    assert looked_at(state, [], 61_000, WELL_FOR_MS).faults == ()


def test_a_fault_that_is_seen_again_is_waited_for_anew():
    state = looked_at(Quarantine(), [ECC], 0, WELL_FOR_MS)
    state = looked_at(state, [ECC], 50_000, WELL_FOR_MS)
    assert looked_at(state, [], 100_000, WELL_FOR_MS).faults == (ECC,)
    assert looked_at(state, [], 110_000, WELL_FOR_MS).faults == ()


def test_a_guest_is_over_at_once_and_lengthens_nothing():
    state = looked_at(looked_at(Quarantine(), [FOREIGN], 0, WELL_FOR_MS), [], 1, WELL_FOR_MS)
    assert (state.faults, state.times) == ((), 0)


def test_each_relapse_doubles_the_time_until_a_day_was_quiet():
    state, now_ms = Quarantine(), 1_000_000
    for times in (1, 2, 3):
        state = looked_at(state, [ECC], now_ms, WELL_FOR_MS)
        due_ms = now_ms + WELL_FOR_MS * 2 ** (times - 1)
        assert state.times == times
        assert looked_at(state, [], due_ms - 1, WELL_FOR_MS).faults == (ECC,)
        state = looked_at(state, [], due_ms, WELL_FOR_MS)
        assert state.faults == ()
        now_ms = due_ms + 1
    later_ms = now_ms + FORGOTTEN_MS + WELL_FOR_MS
    assert looked_at(state, [ECC], later_ms, WELL_FOR_MS).times == 1


def test_an_event_joins_what_is_wrong_already():
    xid = of_xid(48)
    assert xid is not None
    state = struck(looked_at(Quarantine(), [ECC, FOREIGN], 0, WELL_FOR_MS), xid, 10)
    assert {fault.code for fault in state.faults} == {"ecc", "foreign", "xid_48"}
    assert state.stops
    assert {fault.code for fault in looked_at(state, [], 20, WELL_FOR_MS).faults} == {"ecc", "xid_48"}
