"""How measured figures are judged and written down."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.figures import higher_is_better, lower_is_better, percentile, plain
from benchmarks.report import BEGIN, END, merged, table, write_page, write_results


def test_a_ratio_above_one_is_better_whichever_way_the_unit_runs():
    assert lower_is_better("latency", 2.0, "ms", "peer", 4.0, 3.0).ratio == 2.0
    assert higher_is_better("rate", 800.0, "tasks/s", "peer", 400.0, 750.0).ratio == 2.0


def test_a_target_is_met_only_with_all_its_conditions():
    assert lower_is_better("latency", 2.0, "ms", "peer", 4.0, 3.0).met is True
    assert lower_is_better("latency", 2.0, "ms", "peer", 4.0, 3.0, more=False).met is False
    assert lower_is_better("latency", 3.1, "ms", "peer", 4.0, 3.0).met is False
    assert higher_is_better("rate", 800.0, "tasks/s", "peer", 900.0, 750.0).met is False, "ahead of the peer is part of it"


def test_a_percentile_is_a_value_that_was_measured():
    assert percentile([5.0, 1.0, 9.0], 99) == 9.0
    assert percentile([5.0, 1.0, 9.0], 50) == 5.0


def test_a_partial_run_replaces_its_own_figures_and_keeps_the_others(tmp_path: Path):
    results = tmp_path / "results.json"
    write_results(results, [plain("a", 1.0, "ms").as_row(), plain("b", 2.0, "ms").as_row()])
    known = merged(results, [plain("b", 3.0, "ms").as_row(), plain("c", 4.0, "ms").as_row()])
    assert [(row["id"], row["value"]) for row in known] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]
    assert set(json.loads(results.read_text())[0]) == {
        "id", "value", "unit", "peer", "peer_value", "ratio", "target", "met", "machine",
    }  # fmt: skip


def test_a_target_that_is_not_met_says_so_in_the_table():
    text = table([lower_is_better("latency", 5.0, "ms", "Peer", 4.0, 3.0).as_row()])
    assert "| `latency` | 5 ms | 4 ms (Peer) | 0.8 | at most 3 ms | **no** |" in text


def test_what_people_wrote_around_the_figures_stays(tmp_path: Path):
    page = tmp_path / "performance.md"
    page.write_text(f"# Speed\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    for _ in range(2):
        write_page(page, [plain("a", 1.0, "ms").as_row()], "2026-01-01", None)
    text = page.read_text()
    assert text.startswith("# Speed\n\nBefore.\n")
    assert text.endswith(f"{END}\n\nAfter.\n")
    assert "old" not in text
    assert text.count("`a`") == 1
