"""A whole store as one file, and back into a store of any kind: gzip, JSON lines, every row with its table."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from crater_core import __version__
from crater_core.errors import BadConfiguration, Conflict
from crater_core.store.protocol import Loaded, PortableStore
from crater_core.store.rows import TABLES, Row, plain, unplain

FORMAT = 1


def write_backup(store: PortableStore, file: IO[bytes]) -> int:
    """The store as of one moment; gives the number of rows."""
    standing, rows = store.dump()
    head = {"crater_backup": FORMAT, "version": __version__}
    head |= {"revision": standing.revision, "term": standing.term, "sequence": standing.sequence}
    count = 0
    with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3, mtime=0) as packed:
        packed.write(_line(head))
        for table, row in rows:
            packed.write(_line([table, *plain(table, row)]))
            count += 1
        packed.write(_line({"rows": count}))
    return count


def read_backup(store: PortableStore, file: IO[bytes], force: bool = False) -> int:
    """Fill the store from a backup; gives the number of rows. Nothing is written from a file that is not whole.

    Raises Conflict when the store holds something already, unless `force`d, and BadConfiguration for a bad file.
    """
    standing, count = check_backup(file)
    now = store.load()
    if now.revision and not force:
        raise Conflict(
            f"the store is not empty (revision {now.revision}): restoring would replace all that is in it. "
            "Say --force if that is meant",
            revision=now.revision,
        )
    file.seek(0)
    store.fill(standing, _rows(_lines(file)))
    return count


def check_backup(file: IO[bytes]) -> tuple[Loaded, int]:
    """Where the backed-up store stood and how many rows there are. Raises BadConfiguration when the file is not whole."""
    lines = _lines(file)
    first: Any = next(lines, None)
    head = cast("dict[str, Any]", first) if isinstance(first, dict) else {}
    if "crater_backup" not in head:
        raise BadConfiguration("the file is not a backup of Crater's")
    if head["crater_backup"] > FORMAT:
        raise BadConfiguration(f"the backup was made by a newer version of Crater ({head.get('version')}); upgrade Crater")
    count, end = 0, None
    for line in lines:
        if isinstance(line, dict):
            end = cast("dict[str, Any]", line).get("rows")
            break
        if line[0] not in TABLES:
            raise BadConfiguration(f"the backup holds a table that this version does not know: {line[0]}")
        count += 1
    if end != count:
        raise BadConfiguration(f"the backup is not whole: it ends after {count} rows")
    return Loaded(head["revision"], head["term"], head["sequence"]), count


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _lines(file: IO[bytes]) -> Iterator[Any]:
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as packed:
            for line in packed:
                yield json.loads(line)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadConfiguration(f"the backup cannot be read: {error}") from error


def _rows(lines: Iterator[Any]) -> Iterator[tuple[str, Row]]:
    next(lines)
    for line in lines:
        if isinstance(line, list):
            table, *row = cast("list[Any]", line)
            yield table, unplain(table, row)
