"""The `crater` command. Nothing heavy is imported before it is needed, so that `crater --help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Console script: runs one command and exits with its code (see `docs/cli.md`)."""
    from crater_core.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
