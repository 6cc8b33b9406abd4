"""The stand-in for NVIDIA's MPS control program: `build(directory)` puts it there under its name, for a PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.py")
NAME = "nvidia-cuda-mps-control"


def build(directory: Path) -> Path:
    """The directory with the program, which any user may run."""
    program = directory / NAME
    python = Path(sys.executable).resolve()
    program.write_text(f'#!/bin/sh\nexec "{python}" -I -S "{SOURCE}" "{directory}" "$@"\n')
    program.chmod(0o755)
    return directory


def environ(directory: Path) -> dict[str, str]:
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def steer(directory: Path, *words: str) -> None:
    """What goes wrong from now on: see README.md."""
    new = directory / "mps-steer.new"
    new.write_text(" ".join(words))
    new.replace(directory / "mps-steer")


def commands(directory: Path) -> list[str]:
    """What daemons were told, oldest first."""
    file = directory / "mps-commands"
    return file.read_text().splitlines() if file.exists() else []
