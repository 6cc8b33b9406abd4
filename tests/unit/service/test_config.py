"""What stands in scheduler.yaml reaches the decisions, and every key of the queue is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from crater_core.errors import BadConfiguration
from crater_core.model.snapshot import Settings
from crater_core.service.config import QueueSettings, load_config

QUEUE = """
queue:
  passing: free
  reservations_max: 3
  hold_after: 2m
  preempt_min_run: 5s
  preemptions_max: 1
  reclaim_after: 20m
  foretell: false
  project_weights: {vision: 2}
  fair_share_half_life: 1d
  raise_after: 1h
  short_first: 0.5
"""


def test_every_setting_of_the_queue_reaches_the_decisions(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text(QUEUE)
    assert load_config(file).settings() == Settings(
        passing="free",
        reservations_max=3,
        hold_after_ms=120_000,
        preempt_min_run_ms=5_000,
        preemptions_max=1,
        reclaim_after_ms=1_200_000,
        foretell=False,
        project_weights={"vision": 2000},
        fair_share_half_life_ms=86_400_000,
        raise_after_ms=3_600_000,
        short_first_milli=500,
    )
    assert {line.split(":")[0].strip() for line in QUEUE.strip().splitlines()[1:]} == set(QueueSettings.model_fields)


def test_without_a_file_the_decisions_have_their_own_defaults() -> None:
    assert load_config(None).settings() == Settings()


@pytest.mark.parametrize("number", ["-1", "1001"])
def test_a_factor_out_of_bounds_is_told(tmp_path: Path, number: str) -> None:
    file = tmp_path / "scheduler.yaml"
    file.write_text(f"queue: {{short_first: {number}}}")
    with pytest.raises(BadConfiguration) as refused:
        load_config(file)
    assert refused.value.fields["field"] == "queue.short_first"


@pytest.mark.parametrize("key", sorted(QueueSettings.model_fields))
def test_every_key_of_the_queue_stands_in_the_documents(key: str) -> None:
    root = Path(__file__).parents[3]
    assert f"| `{key}` |" in (root / "docs" / "configuration.md").read_text()
    assert f"{key}:" in (root / "deploy" / "scheduler.yaml").read_text()
