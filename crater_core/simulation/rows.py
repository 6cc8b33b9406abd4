"""Rows of a table in a file, CSV or Parquet, whose cells are read strictly: what is wrong is told with file, line and column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from crater_core.errors import InvalidRequest

LARGEST = 1 << 60
"""Beyond this a number in a trace is a slip of the pen."""


def plots_missing(what: str) -> InvalidRequest:
    """What to say when matplotlib or pyarrow is not installed."""
    return InvalidRequest(
        f"{what} needs the extra [plots], which is not installed", next_step="Install it: pip install 'crater-dagster[plots]'."
    )


class Row:
    """One line. Every reading names the column; an absent optional cell gives the default."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, object]) -> None:
        self._path, self._line, self._cells = path, line, cells

    def wrong(self, column: str, why: str) -> InvalidRequest:
        found = self._cells.get(column)
        return InvalidRequest(
            f"{self._path}, line {self._line}, column {column}: {why}, found {str(found)[:60]!r}",
            file=str(self._path),
            line=self._line,
            column=column,
        )

    def text(self, column: str, default: str | None = None) -> str:
        value = self._cells.get(column)
        text = "" if value is None else str(value).strip()
        if text:
            return text
        if default is None:
            raise self.wrong(column, "a value is missing")
        return default

    def number(self, column: str, default: float | None = None) -> float:
        """At least zero."""
        text = self.text(column, "" if default is not None else None)
        if not text:
            assert default is not None, "text() has refused an empty cell"
            return default
        try:
            value = float(text)
        except ValueError:
            raise self.wrong(column, "a number is expected") from None
        if not math.isfinite(value) or value > LARGEST:
            raise self.wrong(column, "the number is too large")
        if value < 0:
            raise self.wrong(column, "a number must not be negative")
        return value

    def whole(self, column: str, default: int | None = None, at_least: int = 0) -> int:
        value = self.number(column, default)
        if value != int(value):
            raise self.wrong(column, "a whole number is expected")
        if value < at_least:
            raise self.wrong(column, f"a number of at least {at_least} is expected")
        return int(value)


def columns_of(path: Path) -> list[str]:
    """The header. Raises InvalidRequest for a file that is not there, is empty or is no table."""
    if path.suffix == ".parquet":
        return [str(name) for name in _parquet(path).column_names]
    with _opened(path) as file:
        header = next(csv.reader(file), None)
    if not header:
        raise InvalidRequest(f"{path} is empty: a header row is expected", file=str(path))
    return [name.strip() for name in header]


def rows_of(path: Path, needed: Sequence[str], known: Sequence[str] = ()) -> list[Row]:
    """All rows. Columns that are missing or that nobody knows, and a table without rows, are errors."""
    columns = columns_of(path)
    missing = [name for name in needed if name not in columns]
    if missing:
        raise InvalidRequest(f"{path} lacks the columns {', '.join(missing)}", file=str(path), column=missing[0])
    unknown = [name for name in columns if name not in needed and name not in known]
    if unknown:
        expected = ", ".join([*needed, *known])
        raise InvalidRequest(
            f"{path}, line 1: unknown column {unknown[0]!r}; known are {expected}", file=str(path), line=1, column=unknown[0]
        )
    rows = [Row(path, line, cells) for line, cells in _cells_of(path, columns)]
    if not rows:
        raise InvalidRequest(f"{path} has a header and no rows", file=str(path))
    return rows


def _cells_of(path: Path, columns: list[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
    if path.suffix == ".parquet":
        yield from enumerate(cast("list[dict[str, Any]]", _parquet(path).to_pylist()), 1)
        return
    with _opened(path) as file:
        reader = csv.reader(file)
        next(reader, None)
        for values in reader:
            if not values:
                continue
            if len(values) != len(columns):
                raise InvalidRequest(
                    f"{path}, line {reader.line_num}: {len(values)} cells, the header has {len(columns)}",
                    file=str(path),
                    line=reader.line_num,
                )
            yield reader.line_num, dict(zip(columns, values, strict=True))


def _opened(path: Path) -> Any:
    try:
        return path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}", field="trace", file=str(path)) from None


def _parquet(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise plots_missing("reading Parquet") from None
    try:
        return cast(Any, parquet).read_table(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as Parquet: {error}", field="trace", file=str(path)) from None
