"""The numbered steps that bring a store's schema up to date. A step that has been released is never edited."""

from __future__ import annotations

from importlib import resources


def schema_files(kind: str) -> list[tuple[int, str]]:
    """Every step for a kind of store ("sqlite", "postgres") with its number, in order."""
    folder = resources.files("crater_core.store") / "schema" / kind
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return [(int(name.split("_")[0]), (folder / name).read_text("utf-8")) for name in names]
