"""Faults of GPUs that no reading shows are known to an agent that is started anew, on the same boot of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from crater_agent.gpu_faults import Fault
from crater_agent.gpu_kept import KeptFaults
from crater_agent.gpu_quarantine import Quarantine, looked_at

XID, ECC = Fault("xid_79", "the driver reported Xid 79", stops=True), Fault("ecc", "3 uncorrectable ECC error(s)")
WELL_FOR_MS = 60_000


def test_what_no_reading_shows_is_kept_until_its_time_is_over(tmp_path: Path):
    KeptFaults(tmp_path, "boot").save({"GPU-a": Quarantine((ECC, XID), 1_000, 2_000, 2), "GPU-b": Quarantine((ECC,), 5, 5, 1)})
    kept = KeptFaults(tmp_path, "boot").load()
    assert kept == {"GPU-a": Quarantine((XID,), 1_000, 2_000, 2)}
    # The second time within a day: twice as long.
    assert looked_at(kept["GPU-a"], (), 2_000 + 2 * WELL_FOR_MS - 1, WELL_FOR_MS).faults == (XID,)
    assert looked_at(kept["GPU-a"], (), 2_000 + 2 * WELL_FOR_MS, WELL_FOR_MS).faults == ()


def test_another_boot_of_the_machine_begins_anew(tmp_path: Path):
    KeptFaults(tmp_path, "boot").save({"GPU-a": Quarantine((XID,), 1, 1, 1)})
    assert KeptFaults(tmp_path, "other").load() == {}


def test_what_is_over_is_no_longer_kept(tmp_path: Path):
    kept = KeptFaults(tmp_path, "boot")
    kept.save({"GPU-a": Quarantine((XID,), 1, 1, 1)})
    kept.save({"GPU-a": Quarantine((), 0, 1, 1)})
    assert KeptFaults(tmp_path, "boot").load() == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"boot_id": "boot", "quarantines": {"GPU-a": {"faults": [{"code": 1}]}}}', "null"]
)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: str):
    (tmp_path / "gpus.json").write_text(text)
    assert KeptFaults(tmp_path, "boot").load() == {}
