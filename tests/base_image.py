"""A base for the images of deploy/, in place of the public one: this machine's own Debian and Python, with no network needed.

What `pip install` of the project would fetch lies there already, where pip finds it installed: the build does all that it does
anywhere else, but for the downloads.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from machine_copy import copy_libraries, make_root
from packaging.requirements import Requirement

PACKAGES = [
    "bash",
    "dash",
    "coreutils",
    "sed",
    "grep",
    "findutils",
    "passwd",
    "login",
    "e2fsprogs",
    "libc-bin",
    "mount",
    "util-linux",
]
ROOTS = (Requirement("crater-dagster[postgres,etcd]"), Requirement("hatchling"))
CHANGES = [
    "ENV PATH=/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin",
    "ENV PYTHONPATH=/deps PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_ROOT_USER_ACTION=ignore",
]
"""(pip takes 0 there for: no isolated environment, which would have to be downloaded.)"""


def make_tree(tree: Path) -> None:
    """A root file system. Its Python is at the path that it has here, so it needs no patching."""
    make_root(tree, PACKAGES, ("usr/local/bin", "root"))
    _python(tree)
    for distribution in _distributions():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and source.is_file() and "tests" not in file.parts:
                (tree / "deps" / file).parent.mkdir(parents=True, exist_ok=True)
                os.link(source, tree / "deps" / file) if _same_disk(source, tree) else shutil.copy2(source, tree / "deps" / file)
    copy_libraries(tree)
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\n")
    (tree / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (tree / "etc/shadow").write_text("root:*:1::::::\n")


def _same_disk(source: Path, tree: Path) -> bool:
    return source.stat().st_dev == tree.stat().st_dev


def _python(tree: Path) -> None:
    version, base = f"python{sys.version_info.major}.{sys.version_info.minor}", Path(sys.base_prefix)
    home = tree / str(base).lstrip("/")
    (home / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy2((base / "bin" / version).resolve(), home / "bin" / version)
    without = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "*.a")
    shutil.copytree(base / "lib" / version, home / "lib" / version, symlinks=True, ignore=without, dirs_exist_ok=True)
    if (wheels := Path("/usr/share/python-wheels")).is_dir():
        shutil.copytree(wheels, tree / "usr/share/python-wheels", dirs_exist_ok=True)
    for name in ("python3", "python"):
        (tree / "usr/local/bin" / name).symlink_to(base / "bin" / version)
    for directory in (home, *home.parents):
        if directory == tree:
            break
        directory.chmod(0o755)  # It may lie in a home that only its owner can enter.


def _distributions() -> Iterator[importlib.metadata.Distribution]:
    """What the roots need, with all that these need. Not the project itself: that is what the images are built of."""
    pending, seen = [(root, frozenset(root.extras)) for root in ROOTS], set[tuple[str, frozenset[str]]]()
    while pending:
        wanted, extras = pending.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if (name, extras) in seen:
            continue
        fresh = all(name != other for other, _ in seen)
        seen.add((name, extras))
        found = importlib.metadata.distribution(name)
        if fresh and name != "crater-dagster":
            yield found
        for line in found.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                pending.append((need, frozenset(need.extras)))


def as_layer(tree: Path) -> bytes:
    content = io.BytesIO()

    def of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        return entry

    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in sorted(tree.iterdir()):
            tar.add(path, path.name, filter=of_root)
    return content.getvalue()
