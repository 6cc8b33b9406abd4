"""What a template of Dagster's workers has ready for its forks, and that nothing stays open in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from postgres_server import PostgresServer, a_postgres

PROGRAM = Path(__file__).parent / "programs" / "preloading.py"
MODULES = {
    "some_values": "import dagster as dg\n@dg.job\ndef work(): ...\ndefs = dg.Definitions(jobs=[work])\n",
    "some_function": "import dagster as dg\n@dg.definitions\ndef defs():\n    import some_part\n    return dg.Definitions()\n",
    "some_part": "",
    "some_mistake": "import dagster as dg\n@dg.definitions\ndef defs():\n    raise ValueError('not ready')\n",
    "some_library": "VALUE = 1\n",
}


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with a_postgres() as server:
        yield server


@pytest.fixture
def preloaded(tmp_path: Path):
    """What a process tells that has imported these modules, and last `crater_dagster.preload`; `config` is dagster.yaml's."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)

    def run(config: dict[str, Any], *modules: str) -> dict[str, Any]:
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        (home / "dagster.yaml").write_text(yaml.safe_dump({"telemetry": {"enabled": False}, **config}))
        environment = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, str(PROGRAM), *modules, "crater_dagster.preload"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        return {**json.loads(done.stdout), "stderr": done.stderr, "home": home}

    return run


def test_the_definitions_of_code_locations_are_loaded_and_mistakes_are_left_to_the_workers(preloaded):
    told = preloaded({}, "some_values", "some_function", "some_mistake", "some_library")
    assert told["imported"] == ["some_function", "some_library", "some_mistake", "some_part", "some_values"]
    assert (told["threads"], told["open"], told["context"], told["stderr"]) == (1, [], False, "")
    assert told["fork"] == [0, 0, True]
    assert told["client"]
    # It has looked, and made nothing but what any use of an instance makes.
    assert sorted(path.name for path in (told["home"] / "history").rglob("*.db")) == ["index.db", "runs.db"]


def test_on_postgresql_no_connection_stays_open_and_a_fork_makes_its_own(preloaded, postgres: PostgresServer):
    config = {"storage": {"postgres": {"postgres_url": postgres.create_database("preloaded")}}}
    told = preloaded(config, "some_values")
    assert (told["threads"], told["open"], told["fork"]) == (1, [], [0, 1, True])
