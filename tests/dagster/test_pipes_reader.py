"""Messages in a stream of output, however it is cut into chunks."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crater_dagster.pipes_reader import MessageLines


def _message(number: int) -> bytes:
    return json.dumps({"__dagster_pipes_version": "0.1", "method": "log", "params": {"n": number}}).encode() + b"\n"


STREAM = b"plain\n" + _message(1) + b"50%|##  |" + _message(2) + b'{"__dagster_pipes_version": broken}\n' + _message(3) + b"end"
PLAIN = b'plain\n50%|##  |{"__dagster_pipes_version": broken}\nend'


def _read(chunks: list[bytes]) -> tuple[list[int], bytes]:
    messages: list[int] = []
    output = bytearray()
    lines = MessageLines(lambda message: messages.append(message["params"]["n"]), output.extend)
    for chunk in chunks:
        lines.feed(chunk)
    lines.end()
    return messages, bytes(output)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_each_message_and_each_byte_of_output_comes_once(size: int):
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert _read(chunks) == ([1, 2, 3], PLAIN)


@given(st.lists(st.integers(1, len(STREAM)), max_size=20))
def test_no_cut_changes_what_is_read(cuts: list[int]):
    places = sorted({0, *cuts, len(STREAM)})
    assert _read([STREAM[a:b] for a, b in itertools.pairwise(places)]) == ([1, 2, 3], PLAIN)


def test_a_progress_bar_is_shown_before_its_line_ends():
    output = bytearray()
    lines = MessageLines(lambda message: None, output.extend)
    lines.feed(b"\r10%")
    assert bytes(output) == b"\r10%"
