"""Reasons: compared as values, read as sentences."""

from __future__ import annotations

import pytest

from crater_core.model.reason import Reason, ReasonCode, next_step, sentence


@pytest.mark.parametrize("code", list(ReasonCode))
def test_every_code_has_a_sentence_even_without_its_facts(code):
    text = sentence(Reason(code))
    assert text.endswith(".")
    assert text[0].isupper() or text[0] in "{?"


def test_the_unit_of_a_fact_is_in_its_name():
    reason = Reason.of(ReasonCode.OOM_KILLED, limit_bytes=512 * 2**20, peak_bytes=2**30)
    assert sentence(reason) == "It was killed for using more memory than its limit: limit 512 MiB, peak 1 GiB."
    assert next_step(reason) == "Ask for more memory than 1 GiB, or make the task use less."


def test_amounts_beside_a_resource_are_in_its_unit():
    reason = Reason.of(ReasonCode.QUOTA_USED_UP, policy="dev", resource="gpu", limit=1000, used=750, wanted=500)
    assert sentence(reason) == "Quota policy dev allows 1 GPU; 0.75 are in use and this asks for 0.5."


def test_reasons_are_compared_by_value():
    assert Reason.of(ReasonCode.EXIT_CODE, exit_code=1) == Reason.of(ReasonCode.EXIT_CODE, exit_code=1)
    assert Reason.of(ReasonCode.EXIT_CODE, exit_code=1) != Reason.of(ReasonCode.EXIT_CODE, exit_code=2)
