"""Scratch space under a project quota of XFS, on a file system that is made for the test."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from crater_agent import disks, project_quota
from crater_agent.records import Record
from crater_agent.scratch import KEPT, Scratch

MIB = 1024**2
NOBODY = 65534


def _mounted(tmp_path: Path, *options: str) -> Path:
    image, at = tmp_path / "xfs.img", tmp_path / "xfs"
    with image.open("wb") as file:
        file.truncate(400 * MIB)
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    at.mkdir()
    subprocess.run(["mount", "-o", ",".join(("loop", *options)), image, at], check=True)
    return at


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    at = _mounted(tmp_path, "prjquota")
    yield at
    subprocess.run(["umount", at], check=True)


def _record(root: Path, name: str, size_bytes: int) -> Record:
    return replace(Record(name, "t", 1), scratch=str(root / name), disk_bytes=size_bytes, disk_held=True)


def _fill(directory: Path, as_user: int = NOBODY) -> tuple[int, str]:
    """Bytes that a program of that user could write there, and what stopped it."""
    program = "import os, sys\ndone = 0\ntry:\n    with open('f', 'wb', buffering=0) as f:\n"
    program += "        while True: done += f.write(bytes(1 << 18))\nexcept OSError as error: print(done, error.errno)\n"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=directory,
        user=as_user,
        group=as_user,
        capture_output=True,
        text=True,
        check=True,
    )
    size, number = done.stdout.split()
    return int(size), errno.errorcode[int(number)]


def test_a_task_gets_all_that_it_asked_for_and_no_more(root: Path):
    assert project_quota.why_none(root) == ""
    scratch = Scratch(root, quota=True)
    record = _record(root, "a", 20 * MIB)
    scratch.make(record, NOBODY, NOBODY)
    written, why = _fill(root / "a")
    assert why == "ENOSPC"
    assert 19 * MIB <= written <= 20 * MIB
    taken, left = disks.used(record.scratch)
    assert 19 * MIB <= taken <= 20 * MIB
    assert left <= MIB
    # Its neighbour is not touched by that.
    scratch.make(_record(root, "b", 30 * MIB), NOBODY, NOBODY)
    assert _fill(root / "b")[0] >= 29 * MIB


def test_what_is_removed_leaves_no_limit_and_no_files(root: Path):
    scratch = Scratch(root, quota=True)
    scratch.make(_record(root, "a", 5 * MIB), NOBODY, NOBODY)
    project = project_quota.project_of(root / "a")
    assert project >= 1 << 30
    _fill(root / "a")
    scratch.remove(root / "a")
    assert not (root / "a").exists()
    assert project_quota.used_bytes(root, project) == 0
    # The same name again gets the same project, with another limit.
    scratch.make(_record(root, "a", 10 * MIB), NOBODY, NOBODY)
    assert project_quota.project_of(root / "a") == project
    assert _fill(root / "a")[0] >= 9 * MIB


def test_the_files_of_a_failed_task_are_kept_and_their_project_is_not_given_to_another(root: Path):
    scratch = Scratch(root, quota=True, keep_failed_ms=1)
    record = _record(root, "a", 5 * MIB)
    scratch.make(record, NOBODY, NOBODY)
    _fill(root / "a")
    project = project_quota.project_of(root / "a")
    scratch.keep(record)
    assert (root / KEPT / "a" / "f").exists()
    scratch.make(record, NOBODY, NOBODY)
    assert project_quota.project_of(root / "a") != project
    os.utime(root / KEPT / "a", (0, 0))
    scratch.remove_old()
    assert list((root / KEPT).iterdir()) == []
    assert project_quota.used_bytes(root, project) == 0


def test_where_there_is_no_quota_the_reason_is_said(tmp_path: Path):
    at = _mounted(tmp_path)
    try:
        assert project_quota.why_none(at).startswith(f"{at} is not on an XFS mounted with prjquota")
        with pytest.raises(OSError, match=r"\[Errno \d+\]") as refused:
            Scratch(at, quota=True).make(_record(at, "a", MIB), NOBODY, NOBODY)
        assert refused.value.errno in (errno.ESRCH, errno.ENOSYS, errno.EINVAL)
        assert list(at.iterdir()) == []
    finally:
        subprocess.run(["umount", at], check=True)
    assert "is not on an XFS" in project_quota.why_none(Path("/var/lib/nowhere/yet"))
