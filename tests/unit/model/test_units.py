"""What people write becomes whole units, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_core.model.units import (
    BYTES_MAX,
    parse_bytes,
    parse_duration_ms,
    parse_mib,
    parse_milli,
    show_bytes,
    show_duration,
    show_milli,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1024, 1024),
        ("10GB", 10 * 10**9),
        ("1.5 GiB", 1536 * 2**20),
        ("2Gi", 2 * 2**30),
        ("512k", 512_000),
        ("0.5", 1),
        ("128 gb", 128 * 10**9),
    ],
)
def test_sizes_are_read_with_their_unit(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10 parsecs", "unknown unit"),
        (-1, "must not be negative"),
        ("-1GB", "not a quantity"),
        ("ten", "not a quantity"),
        (True, "must be a number"),
        (None, "must be a number"),
        (float("nan"), "must be finite"),
        (float("inf"), "must be finite"),
        ("9999999999TiB", "more than 1 EiB"),
        ("", "not a quantity"),
    ],
)
def test_a_wrong_size_says_what_is_wrong(text, says):
    with pytest.raises(ValueError, match=says):
        parse_bytes(text)


def test_gpu_memory_rounds_up_to_whole_mib():
    assert (parse_mib("10GiB"), parse_mib("10GB"), parse_mib(1)) == (10_240, 9_537, 1)


def test_cores_are_thousandths():
    assert (parse_milli(2), parse_milli(0.25), parse_milli("500m"), parse_milli("1.5")) == (2000, 250, 500, 1500)
    with pytest.raises(ValueError, match="finer than one thousandth"):
        parse_milli(0.0001)
    with pytest.raises(ValueError, match="unknown unit 'GB'"):
        parse_milli("2GB")


def test_ten_tenths_of_a_gpu_are_exactly_one():
    assert sum(parse_milli(0.1) for _ in range(10)) == parse_milli(1)


def test_durations():
    assert (parse_duration_ms(30), parse_duration_ms("500ms"), parse_duration_ms("1.5h")) == (30_000, 500, 5_400_000)
    with pytest.raises(ValueError, match="more than ten years"):
        parse_duration_ms("5000d")
    with pytest.raises(ValueError, match="unknown unit 'M'"):
        parse_duration_ms("5M")


@given(st.integers(min_value=0, max_value=BYTES_MAX))
def test_any_whole_number_of_bytes_is_itself(count):
    assert parse_bytes(count) == parse_bytes(str(count)) == count


def test_amounts_are_shown_short():
    assert [show_bytes(n) for n in (0, 1023, 1536, 32 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "32 GiB"]
    assert [show_milli(n) for n in (0, 250, 1000, 1500)] == ["0", "0.25", "1", "1.5"]
    assert [show_duration(n) for n in (250, 1_500, 90_000, 7_200_000, 90_000_000)] == ["250 ms", "1.5 s", "1m 30s", "2h", "1d 1h"]
