"""What deploy/ delivers fits the code: keys, ports, paths, commands and names in units, images and the Compose file."""

from __future__ import annotations

import configparser
import fnmatch
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from crater_agent.config import AgentConfig
from crater_agent.config import load as load_agent
from crater_core.service.config import SchedulerConfig, load_config

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def _scheduler() -> SchedulerConfig:
    return load_config(DEPLOY / "compose/scheduler.yaml", None, ("best_fit",))


def _agent() -> AgentConfig:
    return load_agent(DEPLOY / "compose/agent.yaml")


def _instructions(name: str) -> list[tuple[str, str]]:
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def _of(name: str, instruction: str) -> list[str]:
    return [value for what, value in _instructions(name) if what == instruction]


@pytest.mark.parametrize("service", ["scheduler", "agent"])
def test_each_service_is_built_from_its_file_and_reads_its_configuration_where_the_image_looks(service: str):
    shown = COMPOSE["services"][service]
    base = DEPLOY / "compose"
    assert (base / shown["build"]["context"]).resolve() == ROOT
    file = (base / shown["build"]["context"] / shown["build"]["dockerfile"]).resolve()
    assert file == DEPLOY / f"{service}.Containerfile"
    mounts = [one.split(":") for one in shown["volumes"] if isinstance(one, str)]
    inside = {target: source for source, target, *_ in mounts}
    command = yaml.safe_load(_of(file.name, "CMD")[-1])
    assert command == ["--config", f"/etc/crater/{service}.yaml"]
    assert (base / inside[command[1]]).is_file()
    assert yaml.safe_load(_of(file.name, "ENTRYPOINT")[0]) == [f"crater-{service}"]
    assert f"crater-{service}" in SCRIPTS


def test_the_schedulers_ports_and_store_are_those_of_its_file():
    config, shown = _scheduler(), COMPOSE["services"]["scheduler"]
    ports = {port.partition(":")[2] for port in shown["ports"]}
    assert ports == {config.listen.rpartition(":")[2], str(config.metrics.port)}
    assert str(config.data_dir) in {volume.split(":")[1] for volume in shown["volumes"]}
    assert str(config.data_dir) in _of("scheduler.Containerfile", "VOLUME")
    # No two that could be taken for one another, and none that somebody could know.
    assert {token.role for token in config.tokens} == {"admin", "agent"}


def test_the_agent_finds_the_scheduler_and_keeps_its_data_at_the_same_path_inside_and_outside():
    agent, shown = _agent(), COMPOSE["services"]["agent"]
    assert agent.scheduler_endpoint == (f"http://127.0.0.1:{_scheduler().listen.rpartition(':')[2]}",)
    assert (shown["network_mode"], shown["pid"], shown["cgroup"], shown["privileged"]) == ("host", "host", "host", True)
    bind = next(one for one in shown["volumes"] if isinstance(one, dict))
    assert bind["source"] == bind["target"]
    assert agent.directory.is_relative_to(bind["target"])
    assert bind["bind"]["propagation"] == "rshared"
    assert f"{agent.docker.socket}:{agent.docker.socket}" in shown["volumes"]
    assert "CRATER_TOKEN" in shown["environment"]
    assert agent.token is None
    assert agent.run_as in " ".join(_of("agent.Containerfile", "RUN"))


@pytest.mark.parametrize("name", ["scheduler.Containerfile", "agent.Containerfile"])
def test_health_checks_ask_where_the_process_listens(name: str):
    check = _of(name, "HEALTHCHECK")[0]
    command = yaml.safe_load(check[check.index("[") :])
    url = re.search(r"http://127\.0\.0\.1:(\d+)/health", command[2])
    assert url is not None
    listens = _scheduler().listen if name.startswith("scheduler") else _agent().listen
    assert url[1] == listens.rpartition(":")[2]
    assert url[1] in _of(name, "EXPOSE")[0].split()
    compile(command[2], name, "exec")


@pytest.mark.parametrize("name", ["scheduler.Containerfile", "agent.Containerfile"])
def test_an_image_is_built_from_what_the_context_lets_in(name: str):
    left_out = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "pyproject.toml", "constraints.txt"]
    needed += [project["project"]["readme"], *project["project"]["license-files"]]
    for path in needed:
        assert (ROOT / path).exists()
        assert not [pattern for pattern in left_out if fnmatch.fnmatch(path, pattern)], path
    extras = re.findall(r"/src\[([a-z,]+)\]", " ".join(_of(name, "RUN")))
    assert set(",".join(extras).split(",")) - {""} <= set(project["project"]["optional-dependencies"])


@pytest.mark.parametrize("unit", ["agent/crater-agent.service", "deploy/crater-scheduler.service"])
def test_a_unit_starts_a_program_of_the_project_with_a_file_that_the_guide_names(unit: str):
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string((ROOT / unit).read_text())
    words = shlex.split(parser["Service"]["ExecStart"])
    assert Path(words[0]).name in SCRIPTS
    assert words[words.index("--config") + 1] in (ROOT / "docs/install.md").read_text()
    assert parser["Service"]["RestartPreventExitStatus"] == "2"
