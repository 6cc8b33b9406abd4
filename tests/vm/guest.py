"""Boots the guest once, waits for its end, and reads what its tests said."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vm import image

PATIENCE_S = 600
"""About two minutes are needed where nothing else runs."""
MEMORY = "1536M"


@dataclass(frozen=True)
class Story:
    results: dict[str, dict[str, Any]]
    console: str
    """What kernel and systemd said, for the case that a test is missing."""


def run(place: Path) -> Story:
    """`place`: an empty directory. Everything the guest writes is thrown away, but for its serial ports."""
    kernel, initrd, system = image.boot_files()
    project, console, results = place / "project.img", place / "console.log", place / "results.log"
    image.project_disk(project)
    # Software emulation, unless the processor's own virtualization is there to be used.
    flags = Path("/proc/cpuinfo").read_text().split()
    accelerator = (
        ["kvm", "-cpu", "host"]
        if {"vmx", "svm"} & set(flags) and Path("/dev/kvm").exists()
        else ["tcg,thread=multi", "-cpu", "max"]
    )
    command = [
        "qemu-system-x86_64",
        "-accel",
        *accelerator,
        "-smp",
        "2",
        "-m",
        MEMORY,
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
    ]
    command += [
        "-no-reboot",
        "-kernel",
        str(kernel),
        "-initrd",
        str(initrd),
        "-serial",
        f"file:{console}",
        "-serial",
        f"file:{results}",
    ]
    command += ["-append", "console=ttyS0 panic=-1 quiet mitigations=off tsc=reliable systemd.show_status=0"]
    command += [
        "-drive",
        f"file={system},format=raw,if=virtio,snapshot=on",
        "-drive",
        f"file={project},format=raw,if=virtio,readonly=on",
    ]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as guest:
        try:
            guest.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            guest.kill()
    return Story(_read(results), console.read_text(errors="replace"))


def _read(results: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in results.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    said: dict[str, dict[str, Any]] = {}
    for line in lines:
        # A failure at the end of a test is not made good by its middle.
        if line["test"] not in said or line["outcome"] != "passed":
            said[line["test"]] = line
    return said
