"""A root file system of this machine's own files: packages, and the libraries that programs ask for."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

FOLDERS = ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "dev", "proc", "sys", "run", "tmp", "var/lib")
FOR_PEOPLE = re.compile(r"/usr/share/(doc|man|locale|info|lintian|bash-completion|zsh)")


def make_root(tree: Path, packages: Iterable[str], further: Iterable[str] = ()) -> None:
    """The usual folders and `further` ones, with what these Debian packages have brought to this machine."""
    for name in (*FOLDERS, *further):
        (tree / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / name).symlink_to(f"usr/{name}")
    (tree / "tmp").chmod(0o1777)
    listed = subprocess.run(["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        if line.startswith("/") and not FOR_PEOPLE.match(line):
            copy_into(Path(line), tree)


def copy_into(path: Path, tree: Path) -> None:
    target = tree / str(path).lstrip("/")
    if path.is_symlink():
        if not target.is_symlink() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path.readlink())
    elif path.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif path.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        # What an ordinary user cannot read the guest does without.
        with contextlib.suppress(PermissionError):
            shutil.copy2(path, target)


def copy_libraries(tree: Path) -> None:
    """Every shared library that a program or library of the tree asks for."""
    elves = [path for path in tree.rglob("*") if path.is_file() and not path.is_symlink() and _is_elf(path)]
    shown = subprocess.run(["ldd", *elves], capture_output=True, text=True, check=False).stdout
    for name in set(re.findall(r"(?:=> )?(/\S+) \(0x", shown)):
        path = Path(name)
        if not name.startswith(str(tree)):
            # One that lies in somebody's home, as Python's own may, goes where every user's loader looks.
            usual = name.startswith(("/lib", "/usr/lib"))
            target = tree / name.lstrip("/") if usual else tree / "usr/lib" / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                shutil.copy2(path.resolve(), target)
    # (Only root can; without it the loader looks into the usual places, which is where these are.)
    subprocess.run(["/sbin/ldconfig", "-r", tree], check=False, stderr=subprocess.DEVNULL)


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
