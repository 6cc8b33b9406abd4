"""Whose a device's processes are, what each task uses of it, and how long it does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_agent.gpu_idle import idle_since
from crater_agent.gpu_reading import Glance, Holder, Reading
from crater_agent.gpu_tenants import Tenancy, any_use, faults_of_tenancy, shares_of_use, tenancy


def _glance(*holders: Holder, used_mib: int | None = 100, use: int | None = 0) -> Glance:
    return Glance("GPU-a", use, used_mib, holders)


def _reading(use: int | None, process_use: dict[int, int] | None, most: int | None = None) -> Reading:
    return Reading(Glance("GPU-a", use, 0, ()), use_percent_max=use if most is None else most, process_use=process_use)


# ---- memory


def test_a_tasks_memory_is_the_sum_over_its_processes():
    glance = _glance(Holder(1, 100), Holder(2, 200), Holder(3, 400))
    assert tenancy(glance, {1: "a", 2: "a", 3: "b"}, None, {}) == Tenancy({"a": 300, "b": 400})


def test_a_process_whose_memory_is_not_told_leaves_the_device_to_the_one_that_is_alone():
    glance = _glance(Holder(1, None), used_mib=700)
    assert tenancy(glance, {1: "a"}, "a", {}) == Tenancy({"a": 700})
    assert tenancy(glance, {1: "a"}, None, {}) == Tenancy({"a": 0})


def test_without_a_list_of_processes_only_one_that_is_alone_is_known():
    glance = Glance("GPU-a", 0, 700, None)
    assert tenancy(glance, {}, "a", {}) == Tenancy({"a": 700})
    assert tenancy(glance, {}, None, {}) is None


def test_a_process_from_outside_is_named_and_a_desktop_is_not():
    glance = _glance(Holder(7, 300), Holder(8, 50, computes=False))
    found = tenancy(glance, {}, None, {7: ("eve", "python"), 8: ("root", "Xorg")})
    (fault,) = faults_of_tenancy(glance, found, occupied=False)
    assert (fault.code, fault.text) == ("foreign", "in use from outside Crater by pid 7 of eve (python)")
    assert faults_of_tenancy(glance, found, occupied=False, ignored=("foreign",)) == ()


def test_memory_that_nobody_holds_is_told_but_for_a_little():
    assert faults_of_tenancy(_glance(used_mib=512), Tenancy({}), occupied=False) == ()
    (fault,) = faults_of_tenancy(_glance(used_mib=513), Tenancy({}), occupied=False)
    assert (fault.code, fault.stops) == ("held", False)
    assert faults_of_tenancy(_glance(used_mib=513), Tenancy({}), occupied=True) == ()


def test_memory_of_a_process_that_has_ended_is_told():
    glance = _glance(Holder(9, 5))
    (fault,) = faults_of_tenancy(glance, tenancy(glance, {}, None, {}, gone={9}), occupied=True)
    assert (fault.code, fault.text) == ("held", "memory is held by pid 9, which has ended")


# ---- use


def test_use_is_taken_process_by_process():
    assert shares_of_use(_reading(80, {1: 30, 2: 20, 3: 10}), {1: "a", 2: "a", 3: "b"}, None) == {"a": 50, "b": 10}


def test_a_sum_above_the_devices_own_use_is_scaled_down():
    assert shares_of_use(_reading(50, {1: 75, 2: 25}), {1: "a", 2: "b"}, None) == {"a": 37, "b": 12}


def test_what_others_use_is_not_a_tasks():
    assert shares_of_use(_reading(100, {1: 100, 9: 100}), {1: "a"}, "a") == {"a": 50}


def test_one_that_is_alone_has_all_of_the_use():
    assert shares_of_use(_reading(64, {1: 20}), {1: "a"}, "a") == {"a": 64}
    assert shares_of_use(_reading(64, None), {}, "a") == {"a": 64}
    assert shares_of_use(_reading(64, None), {1: "a", 2: "b"}, None) is None


@given(
    st.none() | st.integers(0, 100),
    st.dictionaries(st.integers(1, 9), st.integers(0, 100)),
    st.dictionaries(st.integers(1, 9), st.sampled_from("abc")),
)
def test_shares_never_add_up_to_more_than_the_device(use: int | None, by_process: dict[int, int], owners: dict[int, str]):
    shares = shares_of_use(_reading(use, by_process), owners, None)
    assert shares is not None
    assert sum(shares.values()) <= (100 if use is None else use)


# ---- idleness


@pytest.mark.parametrize(
    ("reading", "alone", "used"),
    [
        (_reading(0, {}), True, False),
        (_reading(0, {}, most=3), True, True),
        (_reading(0, {1: 5}), False, True),
        (_reading(90, {2: 90}), False, False),
        (_reading(90, None), False, None),
        (_reading(0, None), False, False),
        (_reading(None, None), True, None),
    ],
)
def test_whether_a_task_computed_at_all(reading: Reading, alone: bool, used: bool | None):
    assert any_use(reading, [1], alone) is used


def test_only_no_use_on_every_device_through_the_whole_window_is_idle():
    since_ms = idle_since(None, [False, False], 1_000)
    assert since_ms == 1_000
    since_ms = idle_since(since_ms, [False, False], 5_000)
    assert since_ms == 1_000
    assert idle_since(since_ms, [False, True], 6_000) is None
    assert idle_since(since_ms, [None, False], 6_000) is None
