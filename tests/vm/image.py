"""Makes what the guest boots from: Debian's cloud kernel, and a disk put together from this machine's own files.

Nothing is installed: the kernel's package is only unpacked, and systemd, Python and the libraries are copied from where they lie
here. Kernel and disk are kept in a cache under a name made from the versions in them; the project goes on a second disk, which is
made anew for each boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import machine_copy
from machine_copy import copy_into, copy_libraries, make_root

PACKAGES = ("systemd", "bash", "dash", "coreutils", "util-linux", "mount", "e2fsprogs", "xfsprogs", "passwd", "libc-bin")
KERNEL = "linux-image-cloud-amd64"
MODULES = ("virtio_pci", "virtio_blk", "loop", "xfs")
DISTRIBUTIONS = ("crater-dagster", "pytest", "pytest-timeout")
LEFT_OUT = re.compile(r"dagster|scipy|sqlalchemy|playwright|docker$")
"""What the scheduler and the agent do without when they start."""
WITHOUT = shutil.ignore_patterns(
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "ensurepip", "config-*", "*.a"
)
PROJECT = Path(__file__).parents[2]
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox mount -t proc none /proc
for module in {modules}; do /bin/busybox insmod /modules/$module; done
/bin/busybox mount -o rw /dev/vda /root
/bin/busybox mount -o ro /dev/vdb /root/project
exec /bin/busybox switch_root /root /lib/systemd/systemd
"""
UNIT = """[Unit]
Description=Tests inside of the guest
After=basic.target
[Service]
Type=oneshot
WorkingDirectory=/project
Environment=PYTHONDONTWRITEBYTECODE=1 HOME=/root RESULTS=/dev/ttyS1 "OPTIONS=-p no:cacheprovider --timeout 150"
ExecStart=/opt/crater/bin/python -m pytest tests/vm/inside -o python_files=*.py -p inside_results $OPTIONS
ExecStopPost=/bin/sh -c 'echo 1 > /proc/sys/kernel/sysrq; echo o > /proc/sysrq-trigger'
StandardOutput=journal+console
"""


def cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "crater-tests" / "vm"
    path.mkdir(parents=True, exist_ok=True)
    return path


def boot_files() -> tuple[Path, Path, Path]:
    """Kernel, initial RAM disk and system disk, from the cache where the versions are the same."""
    with _only_one(cache() / "lock"):
        kernel = _kernel_package()
        name = hashlib.sha256(
            "\n".join(
                [str(kernel.name), *_versions(), *(Path(file).read_text() for file in (__file__, machine_copy.__file__))]
            ).encode()
        ).hexdigest()[:16]
        place = cache() / name
        if not place.exists():
            for old in cache().glob("????????????????"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=cache()) as new:
                _make(kernel, Path(new))
                shutil.copytree(new, place, copy_function=shutil.move)
    return place / "vmlinuz", place / "initrd", place / "system.img"


def project_disk(image: Path) -> None:
    """The code under test, on a disk that can be read only."""
    with tempfile.TemporaryDirectory() as tree:
        for name in ("crater_core", "agent", "deploy", "tests/vm", "tests/agent_harness.py", "pyproject.toml"):
            source, target = PROJECT / name, Path(tree) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, target)
        subprocess.run([sys.executable, "-m", "compileall", "-q", tree, "-s", tree, "-p", "/project"], check=True)
        _disk(Path(tree), image, 64)


def _make(package: Path, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as work:
        tree, kernel = Path(work) / "system", Path(work) / "kernel"
        subprocess.run(["dpkg-deb", "-x", package, kernel], check=True)
        shutil.copy(next((kernel / "boot").glob("vmlinuz-*")), place / "vmlinuz")
        _initrd(kernel, Path(work) / "initrd", place / "initrd")
        _system(tree)
        _disk(tree, place / "system.img", 512)


def _kernel_package() -> Path:
    """Downloaded with apt, and not installed; where apt knows nothing, the last one that was."""
    shown = subprocess.run(["apt-cache", "depends", KERNEL], capture_output=True, text=True, check=False).stdout
    kept = sorted(cache().glob("linux-image-*.deb"))
    name = re.search(r"Depends: (linux-image-\S+)", shown)
    if name is None:
        assert kept, f"apt knows no {KERNEL}: run apt-get update"
        return kept[-1]
    policy = subprocess.run(["apt-cache", "policy", name[1]], capture_output=True, text=True, check=True).stdout
    version = policy.partition("Candidate: ")[2].split()[0].replace(":", "%3a")
    if not (found := [path for path in kept if path.name.startswith(f"{name[1]}_{version}_")]):
        for old in kept:
            old.unlink()
        subprocess.run(["apt-get", "download", "-qq", name[1]], cwd=cache(), check=True, stderr=subprocess.DEVNULL)
        found = list(cache().glob(f"{name[1]}_*.deb"))
    return found[0]


def _versions() -> list[str]:
    asked = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n", *PACKAGES]
    packages = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return [*packages, sys.version, sys.base_prefix, *(f"{d.name} {d.version}" for d in _distributions())]


def _initrd(kernel: Path, tree: Path, file: Path) -> None:
    modules = next((kernel / "lib/modules").iterdir())
    subprocess.run(["busybox", "depmod", "-b", kernel, modules.name], check=True)
    needs = {
        Path(line.partition(":")[0]): line.partition(":")[2].split()
        for line in (modules / "modules.dep").read_text().splitlines()
    }
    by_name = {path.stem: path for path in needs}
    order: list[str] = []

    def add(path: Path) -> None:
        for need in needs[path]:
            add(Path(need))
        if str(path) not in order:
            order.append(str(path))

    for module in MODULES:
        add(by_name[module])
    for name in ("bin", "dev", "proc", "root", "modules"):
        (tree / name).mkdir(parents=True)
    shutil.copy2(shutil.which("busybox") or "/bin/busybox", tree / "bin" / "busybox")
    for path in order:
        shutil.copy2(modules / path, tree / "modules")
    (tree / "init").write_text(INIT.format(modules=" ".join(Path(path).name for path in order)))
    (tree / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
    with file.open("wb") as out:
        subprocess.run(
            ["busybox", "cpio", "-o", "-H", "newc"],
            cwd=tree,
            input=names.encode(),
            stdout=out,
            check=True,
            stderr=subprocess.DEVNULL,
        )


def _system(tree: Path) -> None:
    make_root(tree, PACKAGES, ("project", "root"))
    (tree / "var/run").symlink_to("/run")
    _python(tree)
    copy_libraries(tree)
    (tree / "etc/passwd").write_text(
        "root:x:0:0::/root:/bin/bash\nnobody:x:65534:65534::/:/bin/false\ncrater:x:900:900::/var/lib/crater:/bin/false\n"
    )
    (tree / "etc/group").write_text("root:x:0:\ntty:x:5:\ndisk:x:6:\nnogroup:x:65534:\ncrater:x:900:\n")
    (tree / "etc/hostname").write_text("guest\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost guest\n")
    (tree / "etc/machine-id").write_text("0" * 31 + "1\n")
    units = tree / "etc/systemd/system"
    units.mkdir(parents=True, exist_ok=True)
    (units / "guest-tests.service").write_text(UNIT)
    (units / "default.target").symlink_to("/etc/systemd/system/guest-tests.target")
    (units / "guest-tests.target").write_text("[Unit]\nRequires=basic.target guest-tests.service\nAfter=basic.target\n")
    # What a guest without network, users or other disks only waits for.
    for unit in ("systemd-journal-flush", "systemd-update-utmp", "systemd-random-seed", "systemd-networkd", "systemd-resolved"):
        (units / f"{unit}.service").symlink_to("/dev/null")


def _python(tree: Path) -> None:
    """The interpreter where every user can run it, and a virtual environment with what the project needs at /opt/crater."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base, interpreter = Path(sys.base_prefix), Path("/opt/python/bin") / version
    copy_into(Path("/usr/share/zoneinfo/UTC").resolve(), tree)
    (tree / "opt/python/bin").mkdir(parents=True)
    shutil.copy2((base / "bin" / version).resolve(), tree / str(interpreter).lstrip("/"))
    shutil.copytree(base / "lib" / version, tree / "opt/python/lib" / version, symlinks=True, ignore=WITHOUT)
    home = tree / "opt/crater"
    site = home / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(interpreter)
    (home / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    for distribution in _distributions():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." not in file.parts and source.is_file():
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, site / file)
    subprocess.run([sys.executable, "-m", "compileall", "-q", site, "-s", tree, "-p", "/"], check=False)
    (site / "project.pth").write_text("/project\n/project/agent\n/project/tests\n/project/tests/vm\n")
    for name, module in (("crater-agent", "crater_agent.main"), ("crater-scheduler", "crater_core.service.main")):
        (home / "bin" / name).write_text(f"#!/opt/crater/bin/python\nfrom {module} import main\nmain()\n")
        (home / "bin" / name).chmod(0o755)


def _distributions() -> list[importlib.metadata.Distribution]:
    """What is needed at run time, with all that these need, sorted by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = list(DISTRIBUTIONS)
    while pending:
        name = re.split(r"[ ;<>=!~\[(]", pending.pop(), maxsplit=1)[0].lower().replace("_", "-")
        if name in found or (LEFT_OUT.search(name) and name != "crater-dagster"):
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.distribution(name)
            pending += [line for line in found[name].requires or () if "extra ==" not in line]
    found.pop("crater-dagster", None)
    return [found[name] for name in sorted(found)]


def _disk(tree: Path, image: Path, spare_mib: int) -> None:
    used = sum(path.lstat().st_size // 4096 + 1 for path in tree.rglob("*")) * 4096
    size_mib = int(used * 1.1) // 1024**2 + spare_mib
    command = [
        "mke2fs",
        "-q",
        "-F",
        "-t",
        "ext4",
        "-O",
        "^has_journal",
        "-E",
        "root_owner=0:0",
        "-d",
        tree,
        image,
        f"{size_mib}M",
    ]
    subprocess.run(command, check=True, env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})


@contextlib.contextmanager
def _only_one(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
