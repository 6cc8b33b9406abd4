"""The rules of the house, held against the code itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("crater_core", "crater_dagster", "agent/crater_agent", "example_pipelines")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def modules_imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files_that_import(prefix: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if any(name == prefix or name.startswith(prefix + ".") for name in modules_imported(path))
    }


def test_imports_run_one_way():
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_private_dagster_imports_stand_in_one_file():
    private = {
        str(path.relative_to(ROOT)) for path in SOURCES if any(name.startswith("dagster._") for name in modules_imported(path))
    }
    assert private <= {"crater_dagster/_dagster.py"}


def test_each_outside_library_has_one_door():
    assert files_that_import("pynvml") <= {"agent/crater_agent/nvml.py", "agent/crater_agent/nvml_card.py"}
    assert files_that_import("psutil") <= {"agent/crater_agent/machine.py"}
    assert all(name.startswith("crater_core/store/") for name in files_that_import("sqlite3"))
    assert files_that_import("fastapi") <= {
        name for name in files_that_import("fastapi") if "service" in name or "example" in name
    }


def test_nothing_builds_a_shell_line():
    guilty = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "shell" and getattr(node.value, "value", False):
                guilty.append(f"{path.name}:{node.value.lineno}")
            if isinstance(node, ast.Attribute) and node.attr in ("system", "popen") and getattr(node.value, "id", "") == "os":
                guilty.append(f"{path.name}:{node.lineno}")
    assert guilty == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is_for(path: Path):
    tree = ast.parse(path.read_text())
    if tree.body:
        assert ast.get_docstring(tree), f"{path} has no docstring"


@pytest.mark.parametrize("name", ["crater_dagster", "crater_core.scheduling", "crater_core.client"])
def test_public_names_exist(name: str):
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", ()) if not hasattr(module, public)]
    assert missing == []
