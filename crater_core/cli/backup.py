"""`crater backup, restore, leader`: the scheduler's state as a file and back, and which scheduler leads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from crater_core.cli.session import FAILED, Json, client, note, option, out, print_json
from crater_core.errors import BadConfiguration, Conflict

BackupFile = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]
_STORE = "sqlite:///PATH, postgresql://USER@HOST/NAME, or etcd+http://HOST:2379 (several with commas, then #PREFIX)."


def backup(
    file: BackupFile,
    store: Annotated[str | None, option("URL", f"Read this store itself, with its scheduler stopped: {_STORE}")] = None,
) -> None:
    """Write everything that the scheduler remembers to a file.

    [bold]crater backup crater.backup[/]  [dim]from the scheduler that runs, as an administrator[/]
    """
    partial = file.with_name(file.name + ".partial")
    try:
        # Commands and environments of tasks are in it, so it is nobody else's to read.
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as target:  # noqa: PTH123
            if store is None:
                with client() as crater:
                    target.write(crater.backup())
            else:
                from crater_core.store.backup import write_backup
                from crater_core.store.opening import open_store

                opened = open_store(store)
                try:
                    write_backup(opened, target)
                finally:
                    opened.close()
            target.flush()
            os.fsync(target.fileno())
        with partial.open("rb") as written:
            from crater_core.store.backup import check_backup

            standing, rows = check_backup(written)
        partial.replace(file)
    except OSError as error:
        raise BadConfiguration(f"{file} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    note(f"Wrote {rows} rows as of revision {standing.revision} to {file}.")


def restore(
    file: BackupFile,
    store: Annotated[str, option("URL", f"The store to fill: {_STORE}")],
    force: Annotated[bool, typer.Option("--force", help="Replace what the store holds.", show_default=False)] = False,
) -> None:
    """Fill a store from a backup, of whatever kind of store. Its schedulers must be stopped.

    [bold]crater restore crater.backup --store postgresql://crater@db/crater[/]
    """
    from crater_core.store.backup import read_backup
    from crater_core.store.opening import open_store, shown

    opened = open_store(store)
    try:
        leader = opened.leader()
        if leader is not None:
            raise Conflict(f"the scheduler at {leader.url} leads with this store: stop it first", leader=leader.url)
        with file.open("rb") as source:
            rows = read_backup(opened, source, force)
    except OSError as error:
        raise BadConfiguration(f"{file} cannot be read: {error.strerror}") from error
    finally:
        opened.close()
    note(f"Restored {rows} rows into {shown(store)}.")


def leader(as_json: Json = False) -> None:
    """Say which scheduler leads. Exit code 1 when none does."""
    with client() as crater:
        found = crater.leader()
    if as_json:
        print_json(found)
    else:
        out().print(f"{found.leader or 'nobody leads now'}  term {found.term}, revision {found.revision}")
    if found.leader is None:
        raise typer.Exit(FAILED)


def register(app: typer.Typer) -> None:
    for command in (leader, backup, restore):
        app.command()(command)
