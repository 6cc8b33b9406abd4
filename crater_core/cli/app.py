"""The command's tree, its global options, and what each error becomes: one sentence on standard error, and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
import typer.main

from crater_core import __version__
from crater_core.cli import (
    backup,
    cluster,
    debug,
    events,
    history,
    logs,
    quotas,
    reservations,
    services,
    simulate,
    submit,
    tasks,
    usage,
    whatif,
)
from crater_core.cli.session import DENIED, FAILED, INTERRUPTED, MISSING, UNREACHABLE, USAGE, err, option, session
from crater_core.errors import CraterError, Denied, InvalidRequest, NotFound, Unavailable

app = typer.Typer(
    name="crater",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Run work on pools of GPU, CPU, memory and disk.\n\n"
    "[bold]crater submit --gpu 1 --memory 16GB --follow -- python train.py[/]\n\n"
    "[bold]crater list[/]  [dim]what runs and what waits, and why[/]\n\n"
    "[bold]crater nodes[/]  [dim]the machines, and what is free on them[/]",
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"crater {__version__}\n")
        raise typer.Exit


@app.callback()
def options(
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The scheduler, or several with commas. Else CRATER_ENDPOINT, else http://127.0.0.1:8080."
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Better not here, where others can see it: CRATER_TOKEN, or CRATER_TOKEN_FILE with a path."
        ),
    ] = None,
    user: Annotated[str | None, option("NAME", "For whom; with an administrator's token only.")] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    session.endpoint, session.token, session.user = endpoint, token, user


submit.register(app)
tasks.register(app)
logs.register(app)
cluster.register(app)
quotas.register(app)
reservations.register(app)
services.register(app)
usage.register(app)
events.register(app)
simulate.register(app)
backup.register(app)
whatif.register(app)
history.register(app)
debug.register(app)


def run(arguments: Sequence[str]) -> int:
    """Carry out one command line; the exit code."""
    command = typer.main.get_command(app)
    try:
        result: Any = command.main(list(arguments), prog_name="crater", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except CraterError as error:
        return _told(error)
    except TimeoutError as error:
        err().print(f"crater: {error}", style="red")
        return FAILED
    except (BrokenPipeError, SystemExit):
        # Whoever read our output has seen enough (Typer then exits by itself); Python must not complain at its own end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        return _misused(error, arguments)


def _told(error: CraterError) -> int:
    field, step = str(error.fields.get("field") or ""), str(error.fields.get("next_step") or "")
    message = error.message
    if field and field.rpartition(".")[2] not in message:
        message = f"{field}: {message}"
    stop = "" if message.endswith((".", "!", "?")) else "."
    err().print(f"crater: {message}{stop}{' ' + step if step else ''}", style="red")
    return code_of(error)


def code_of(error: CraterError) -> int:
    """The exit code that an error ends a command with."""
    for kind, code in ((InvalidRequest, USAGE), (NotFound, MISSING), (Denied, DENIED), (Unavailable, UNREACHABLE)):
        if isinstance(error, kind):
            return code
    return FAILED


def _misused(error: Any, arguments: Sequence[str]) -> int:
    context = error.ctx
    message = str(error.format_message())
    if message:
        err().print(f"crater: {message}", style="red")
    option = str(getattr(error, "option_name", ""))
    if option in ("--endpoint", "--token", "--user"):
        err().print(f"{option} stands before the command: crater {option} ... {' '.join(arguments[:1])}")
    elif message and context is not None:
        err().print(f"`{context.command_path} --help` shows how it is used.")
    return USAGE
