"""Scratch directories: made for one allocation, of a fixed size where the node can, removed or kept for a while after its end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from crater_agent import disks, project_quota
from crater_agent.records import Record

log = logging.getLogger("crater.agent.scratch")
IMAGES, KEPT = ".images", ".kept"
"""Beside the scratch directories; no allocation's name begins with a dot."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """What blocks for more than a moment is said so: call it in a thread."""

    root: Path
    no_hard_limit: str = ""
    """Why sizes are watched and not held; empty when they are held."""
    keep_failed_ms: int = 0
    quota: bool = False
    """Sizes are held by a project quota of the file system, not by file systems of their own."""

    def path(self, allocation: str) -> Path:
        return self.root / allocation

    def is_held(self, disk_bytes: int) -> bool:
        """Whether a scratch space of this size would be a file system of its own."""
        return disk_bytes > 0 and not self.no_hard_limit

    def make(self, record: Record, uid: int, gid: int) -> None:
        """Blocks where its size is held. Raises OSError; nothing is left behind then."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(record.scratch, 0o700)  # noqa: PTH102 (on the way of each start)
        if not record.disk_held:
            self._give(record.scratch, uid, gid)
            return
        path = Path(record.scratch)
        if not self.quota:
            self._image(path).parent.mkdir(mode=0o700, exist_ok=True)
            disks.make(self._image(path), path, record.disk_bytes, uid, gid)
            path.chmod(0o700)
            return
        try:
            project_quota.hold(path, record.disk_bytes)
        except OSError:
            path.rmdir()
            raise
        self._give(record.scratch, uid, gid)

    @staticmethod
    def _give(path: str, uid: int, gid: int) -> None:
        if (uid, gid) != (os.geteuid(), os.getegid()):
            os.chown(path, uid, gid)

    def remove_empty(self, record: Record) -> bool:
        """Whether it is gone; one with something in it, or with a file system of its own, is left to `remove`."""
        if record.disk_held or record.scratch.rpartition("/")[0] != str(self.root):
            return False
        try:
            os.rmdir(record.scratch)  # noqa: PTH106 (on the way of each end)
        except OSError:
            return False
        return True

    def remove(self, path: Path) -> None:
        """Blocks. Only what lies in our root."""
        if path.parent != self.root or path.name in (IMAGES, KEPT):
            return
        with contextlib.suppress(OSError):
            disks.remove(self._image(path), path)
        self._remove_tree(path)

    def _remove_tree(self, path: Path) -> None:
        project = 0
        with contextlib.suppress(OSError):
            project = project_quota.project_of(path) if self.quota else 0
        remove_tree(path)
        with contextlib.suppress(OSError):
            project_quota.release(self.root, project)

    def keep(self, record: Record) -> None:
        """Put a failed task's files aside, for somebody to look at. Blocks."""
        path = Path(record.scratch)
        if not self.keep_failed_ms or path.parent != self.root or not path.exists():
            return
        kept = self.root / KEPT
        kept.mkdir(mode=0o700, exist_ok=True)
        try:
            if self._image(path).exists():
                disks.unmount(path)
                os.utime(self._image(path))
                self._image(path).replace(kept / f"{path.name}.img")
            else:
                os.utime(path)
                path.replace(kept / path.name)
        except OSError as error:
            log.warning("the files of %s could not be kept: %s", record.allocation, error)

    def remove_strays(self, known: Iterable[str]) -> None:
        """What a crash has left: directories, images, mounts. Blocks."""
        names = {path.stem for path in (self.root / IMAGES).glob("*.img")} | {path.name for path in self.root.iterdir()}
        for name in names - set(known) - {IMAGES, KEPT}:
            self.remove(self.root / name)

    def remove_old(self) -> None:
        """What was kept for long enough. Blocks."""
        oldest = time.time() - self.keep_failed_ms / 1000
        for path in (self.root / KEPT).glob("*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink() if path.is_file() else self._remove_tree(path)

    def _image(self, path: Path) -> Path:
        return self.root / IMAGES / f"{path.name}.img"


def remove_tree(path: Path) -> None:
    """A task may have taken away its own right to delete."""

    def allow(function: object, name: str, _: object) -> None:
        with contextlib.suppress(OSError):
            Path(name).parent.chmod(0o700)
            Path(name).unlink()

    if path.exists():
        shutil.rmtree(path, onerror=allow)
        shutil.rmtree(path, ignore_errors=True)


def disk_bytes(path: str) -> int:
    """What a directory tree takes on the disk; a file with two names counts once."""
    total, seen = 0, set[tuple[int, int]]()
    pending = [path]
    while pending:
        with contextlib.suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif status.st_nlink > 1:
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * 512
    return total
