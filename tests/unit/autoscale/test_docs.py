"""The examples of docs/autoscaling.md do what they say."""

from __future__ import annotations

import doctest
from pathlib import Path

from crater_core.lifecycle.autoscale import AutoscaleRule, AutoscaleState, Sample, decide

PAGE = Path(__file__).parents[3] / "docs" / "autoscaling.md"


def test_the_examples_of_the_page_run_as_they_stand():
    story = doctest.DocTestParser().get_doctest(PAGE.read_text("utf-8").replace("```", ""), {}, PAGE.name, str(PAGE), 0)
    assert len(story.examples) > 4
    assert doctest.DocTestRunner().run(story).failed == 0


def test_the_sentences_of_the_page_are_the_rules_own():
    rule, page = AutoscaleRule(), PAGE.read_text("utf-8")
    for since_ms, wanted, percent in ((0, 2, 55.0), (-114_000, 2, 90.0), (-120_000, 2, 90.0), (-120_000, 10, 99.0), (0, 2, None)):
        state = AutoscaleState(seen_at_ms=0, wanted=wanted, above_since_ms=since_ms)
        assert decide(rule, state, Sample(wanted, wanted, percent), 0)[1].why in page
