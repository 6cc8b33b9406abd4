"""What a worker is told, carried in its environment: compressed, in as many variables as it needs, never on the command line."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

VARIABLE = "DAGSTER_CRATER_ARGS"
PART_BYTES = 100_000
"""Linux passes one variable of at most 128 KiB."""
PARTS_MAX = 15
"""And about 2 MiB in all."""
UNPACKED_MAX = 256 * 1024**2


def pack(content: Mapping[str, Any]) -> dict[str, str]:
    """Raises ValueError when it is more than a process can be given."""
    text = base64.b64encode(zlib.compress(json.dumps(content, separators=(",", ":")).encode())).decode()
    parts = [text[at : at + PART_BYTES] for at in range(0, len(text), PART_BYTES)]
    if len(parts) > PARTS_MAX:
        raise ValueError(f"{len(text)} bytes after compression; a process can be given {PARTS_MAX * PART_BYTES}")
    return {VARIABLE if number == 0 else f"{VARIABLE}_{number}": part for number, part in enumerate(parts)}


def unpack(environ: Mapping[str, str]) -> dict[str, Any]:
    """Raises ValueError when there is nothing, or something else."""
    text, number = environ.get(VARIABLE, ""), 1
    if not text:
        raise ValueError(f"{VARIABLE} is not set: this program is started by the run launcher and the executor, not by hand")
    while (part := environ.get(f"{VARIABLE}_{number}")) is not None:
        text, number = text + part, number + 1
    try:
        unpacking = zlib.decompressobj()
        content: Any = json.loads(unpacking.decompress(base64.b64decode(text, validate=True), UNPACKED_MAX))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{VARIABLE} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{VARIABLE} cannot be read: it is no object")
    return content
