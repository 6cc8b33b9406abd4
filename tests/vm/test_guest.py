"""Each test of `inside/` by its name: all of them run in one boot of the guest, and what became of each is told here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from vm import guest

INSIDE = Path(__file__).parent / "inside"


def _names() -> list[str]:
    files = sorted(INSIDE.glob("*.py"))
    found = [(file.name, node) for file in files for node in ast.parse(file.read_text()).body]
    return [f"{file}::{node.name}" for file, node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> guest.Story:
    return guest.run(tmp_path_factory.mktemp("guest"))


# (The first one waits for the boot and for all of the guest's tests.)
@pytest.mark.timeout(guest.PATIENCE_S + 120)
@pytest.mark.parametrize("name", _names())
def test_in_the_guest(name: str, story: guest.Story):
    said = story.results.get(name)
    assert said is not None, f"the guest said nothing of it. Its console:\n{story.console[-6000:]}"
    assert said["outcome"] == "passed", said["text"]
