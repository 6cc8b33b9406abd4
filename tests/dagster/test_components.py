"""The components that `dg` lists and scaffolds: what it writes loads, and runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest
import yaml
from dagster.components.testing import create_defs_folder_sandbox
from dagster_world import World

from crater_dagster import CraterResource, PipesCraterClient
from crater_dagster.components import CraterResourceComponent, CraterScriptComponent, CraterServiceAutoscalerComponent

# Of Dagster's own loader of components, and of its Pipes session in this process.
pytestmark = [
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning"),
    pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.PreviewWarning"),
]


def test_dg_lists_the_three(tmp_path: Path):
    (tmp_path / "dg.toml").write_text('directory_type = "project"\n\n[project]\nroot_module = "probe"\n')
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "__init__.py").touch()
    dg_command = Path(sys.executable).parent / "dg"
    done = subprocess.run(
        [dg_command, "list", "components", "--package", "crater_dagster", "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in ("CraterResourceComponent", "CraterScriptComponent", "CraterServiceAutoscalerComponent"):
        assert f"crater_dagster.components.{name}" in done.stdout


def test_a_scaffolded_script_runs_as_it_stands(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRATER_ENDPOINT", world.launcher.connection["endpoint"])
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(CraterScriptComponent, "train", scaffold_params={"cpu": 0.5, "memory": "256MiB"})
        assert (path / "script.py").exists()
        with sandbox.load_component_and_build_defs(path) as (component, defs):
            assert isinstance(component, CraterScriptComponent)
            spec = defs.resolve_all_asset_specs()[0]
            assert spec.key == dg.AssetKey("train")
            assert "crater" in spec.kinds
            done = dg.materialize([*defs.resolve_asset_graph().assets_defs], instance=world.instance)
    assert done.success
    metadata = done.asset_materializations_for_node("script")[0].metadata
    assert metadata["rows"].value == 1
    assert str(metadata["crater/node"].value) in ("n-left", "n-right")


def _load(component: str, attributes: dict[str, object]) -> dg.Definitions:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.defs_folder_path / "one"
        path.mkdir()
        (path / "script.py").touch()
        (path / "defs.yaml").write_text(
            yaml.safe_dump({"type": f"crater_dagster.components.{component}", "attributes": attributes})
        )
        with sandbox.load_component_and_build_defs(path) as (_, defs):
            return defs


def _why_not(component: str, attributes: dict[str, object]) -> str:
    """Dagster's error names the component; why is in the errors it was made of."""
    with pytest.raises(Exception) as raised:
        _load(component, attributes)
    error, texts = raised.value, []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)


def test_wrong_resources_of_a_script_fail_when_the_code_is_loaded():
    attributes = {"script": "script.py", "assets": [{"key": "a"}], "resources": {"gpu": 1.5}}
    assert "gpu" in _why_not("CraterScriptComponent", attributes)


@pytest.mark.parametrize("script", ["../../elsewhere.py", "/etc/passwd"])
def test_a_script_outside_of_its_component_is_refused(script: str):
    assert "is not in the component's folder" in _why_not("CraterScriptComponent", {"script": script, "assets": [{"key": "a"}]})


def test_the_resource_component_gives_the_scheduler_and_a_pipes_client():
    defs = _load("CraterResourceComponent", {"endpoint": "http://127.0.0.1:8080", "project": "vision"})
    crater, pipes = defs.resources["crater"], defs.resources["pipes"]
    assert isinstance(crater, CraterResource)
    assert (crater.endpoint, crater.project) == ("http://127.0.0.1:8080", "vision")
    assert isinstance(pipes, PipesCraterClient)


def test_a_token_is_named_and_never_written_into_the_definitions():
    defs = _load("CraterResourceComponent", {"token_variable": "MY_CRATER_TOKEN"})
    assert defs.resources["crater"].token == dg.EnvVar("MY_CRATER_TOKEN")


def test_the_autoscaler_component_is_a_running_sensor_with_its_rule():
    attributes = {"service": "digits", "replicas_min": 1, "replicas_max": 4, "up_for": "30s"}
    defs = _load("CraterServiceAutoscalerComponent", attributes)
    sensor = defs.sensors[0]
    assert sensor.name == "digits_autoscale"
    assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
    assert "from 1 to 4 replicas" in sensor.description


def test_a_wrong_rule_names_its_field():
    assert "replicas_max must be" in _why_not(
        "CraterServiceAutoscalerComponent", {"service": "digits", "replicas_min": 5, "replicas_max": 4}
    )


def test_a_scaffolded_autoscaler_and_resource_load():
    with create_defs_folder_sandbox() as sandbox:
        scaler = sandbox.scaffold_component(CraterServiceAutoscalerComponent, "digits")
        resource = sandbox.scaffold_component(CraterResourceComponent, "crater")
        for path in (scaler, resource):
            with sandbox.load_component_and_build_defs(path) as (_, defs):
                assert defs.sensors or defs.resources
