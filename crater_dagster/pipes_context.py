"""A Pipes context that is too large for one variable travels in several, and becomes a file on the node.

`python -m crater_dagster.pipes_context PROGRAM ARGUMENTS ...` puts it together there, then becomes the program.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

from dagster_pipes import DAGSTER_PIPES_CONTEXT_ENV_VAR, PipesDefaultContextLoader, decode_param, encode_param

from crater_dagster.payload import VARIABLE, pack, unpack

TEXT_MAX = 120_000


def is_too_large(env: Mapping[str, str]) -> bool:
    return len(env.get(DAGSTER_PIPES_CONTEXT_ENV_VAR, "")) > TEXT_MAX


def in_parts(env: Mapping[str, str], command: Sequence[str], python: str) -> tuple[dict[str, str], list[str]]:
    """Environment and command that lead to the same. Raises ValueError when it is more than any process can be given."""
    context = decode_param(env[DAGSTER_PIPES_CONTEXT_ENV_VAR])[PipesDefaultContextLoader.DIRECT_KEY]
    others = {name: value for name, value in env.items() if name != DAGSTER_PIPES_CONTEXT_ENV_VAR}
    return {**others, **pack({"context": context})}, [python, "-m", "crater_dagster.pipes_context", *command]


def main() -> None:
    import json

    context = unpack(os.environ)["context"]
    with tempfile.NamedTemporaryFile("w", prefix="pipes-", suffix=".json", delete=False, encoding="utf-8") as file:
        json.dump(context, file)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLE)}
    environ[DAGSTER_PIPES_CONTEXT_ENV_VAR] = encode_param({PipesDefaultContextLoader.FILE_PATH_KEY: file.name})
    os.execvpe(sys.argv[1], sys.argv[1:], environ)  # noqa: S606 (becoming the program is its work)


if __name__ == "__main__":
    main()
