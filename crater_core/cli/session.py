"""What every command needs: where the scheduler is, a client for it, and the two outputs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from crater_core.errors import InvalidRequest
from crater_core.model.units import parse_duration_ms

if TYPE_CHECKING:
    from pydantic import BaseModel

    from crater_core.client import CraterClient

OK, FAILED, USAGE, MISSING, DENIED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
RETRY_S = 3.0
PATIENT_S = 120.0
PIPE_WIDTH = 200
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with the API's names and units.", show_default=False)]


def option(metavar: str, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option that shows what kind of value it takes, under the heading `panel`."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def duration_ms(text: str, name: str) -> int:
    """The value of an option such as `--timeout 30s`. Raises InvalidRequest that names the option."""
    try:
        return parse_duration_ms(text, f"--{name}")
    except ValueError as error:
        raise InvalidRequest(f"{error}; give a time such as 30s, 5m or 2h", field=name) from None


@dataclass
class Session:
    """Global options of the command that runs."""

    endpoint: str | None = None
    token: str | None = None
    user: str | None = None


session = Session()


def client(patient: bool = False) -> CraterClient:
    """`patient`: a scheduler that restarts does not end a command that waits or follows."""
    from crater_core.client import CraterClient

    retry_for_s = PATIENT_S if patient else RETRY_S
    return CraterClient.from_env(session.endpoint, session.token, user=session.user, retry_for_s=retry_for_s)


def out() -> Console:
    """Standard output. Colours and the terminal's width on a terminal only; a pipe gets whole lines."""
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def err() -> Console:
    return Console(file=sys.stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def note(text: str) -> None:
    """A remark beside the output, on standard error."""
    err().print(text, style="dim")


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any]) -> None:
    shown: Any
    if isinstance(value, dict):
        shown = value
    elif isinstance(value, Sequence):
        shown = [one.model_dump(mode="json") for one in value]
    else:
        shown = value.model_dump(mode="json")
    sys.stdout.write(json.dumps(shown, indent=2, ensure_ascii=False) + "\n")


def print_json_line(value: BaseModel) -> None:
    """One object a line, for streams."""
    sys.stdout.write(value.model_dump_json() + "\n")
    sys.stdout.flush()
