"""What the agent keeps on disk is there after a crash and after a power cut."""

from __future__ import annotations

from pathlib import Path

from crater_agent.records import Record, Records
from crater_core.model.allocation import AllocationStatus
from crater_core.wire.agents import ReportBody


def an_end(allocation: str, exit_code: int = 0) -> ReportBody:
    return ReportBody(allocation=allocation, token=7, status=AllocationStatus.SUCCEEDED, exit_code=exit_code)


def ends_found(place: Path) -> dict[str, ReportBody | None]:
    return {kept.record.allocation: kept.final for kept in Records(place).read_all()}


def test_ends_that_are_written_together_are_each_found_again(tmp_path: Path):
    records = Records(tmp_path)
    for name in ("a", "b", "c"):
        records.begin(Record(name, "t", 7))
    records.finish([an_end("a"), an_end("b", 3)])()
    assert ends_found(tmp_path) == {"a": an_end("a"), "b": an_end("b", 3), "c": None}


def test_an_end_whose_file_was_swallowed_by_a_power_cut_is_in_the_journal(tmp_path: Path):
    records = Records(tmp_path)
    for name in ("a", "b"):
        records.begin(Record(name, "t", 7))
    records.finish([an_end("a", 3), an_end("b")])()
    (tmp_path / "allocations/a/final.json").write_bytes(b"")
    (tmp_path / "allocations/b/final.json").unlink()
    with (tmp_path / "ends.jsonl").open("ab") as journal:
        journal.write(b'{"allocation": "torn')
    assert ends_found(tmp_path) == {"a": an_end("a", 3), "b": an_end("b")}


def test_the_journal_does_not_grow_for_ever(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("crater_agent.records.JOURNAL_BYTES_MAX", 300)
    records = Records(tmp_path)
    records.begin(Record("a", "t", 7))
    for code in range(50):
        records.finish([an_end("a", code)])()
        assert (tmp_path / "ends.jsonl").stat().st_size < 600
    assert ends_found(tmp_path) == {"a": an_end("a", 49)}
