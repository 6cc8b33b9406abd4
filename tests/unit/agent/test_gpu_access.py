"""Who may open the device files of GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crater_agent.gpu_access import closed_files, why_closed

UID, GID = 65_001, 65_002


@pytest.mark.parametrize(
    ("mode", "groups", "closed"),
    [
        (0o666, (), False),
        (0o660, (os.getegid(),), False),
        (0o660, (), True),
        (0o600, (os.getegid(),), True),
        (0o640, (os.getegid(),), True),
    ],
)
def test_a_file_is_closed_to_those_who_are_not_in_its_group(tmp_path: Path, mode: int, groups: tuple[int, ...], closed: bool):
    file = tmp_path / "nvidia0"
    file.touch()
    file.chmod(mode)
    assert bool(closed_files([file], UID, groups)) is closed


def test_root_and_the_owner_may(tmp_path: Path):
    file = tmp_path / "nvidia0"
    file.touch()
    file.chmod(0o600)
    assert closed_files([file], file.stat().st_uid, ()) == []
    assert closed_files([file], 0, ()) == []


def test_the_words_name_the_group_and_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "nvidia0"
    file.touch()
    file.chmod(0o660)
    assert why_closed(tmp_path / "nowhere") == ""
    for name, value in (("geteuid", UID), ("getegid", GID)):
        monkeypatch.setattr(os, name, lambda value=value: value)
    monkeypatch.setattr(os, "getgroups", lambda: [GID])
    group = closed_files([file], UID, ())[0][1]
    words = why_closed(tmp_path)
    assert words.startswith(f"{file} is open to ")
    assert (f"usermod -aG {group} {UID}" in words) is (group != "root")
