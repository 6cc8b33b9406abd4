"""`CraterScriptComponent`: assets that a Python script beside the `defs.yaml` makes, on allocated compute, by Dagster Pipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
from pydantic import BaseModel, Field

from crater_core.errors import InvalidRequest
from crater_dagster.options import merge, pools_of, submission
from crater_dagster.pipes import PipesCraterClient
from crater_dagster.tags import crater_tags

SCRIPT = """\
\"\"\"Runs as a task of Crater. What it reports here is in the Dagster run.\"\"\"

from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.log.info(f"making {pipes.asset_key}")
    pipes.report_asset_materialization(metadata={"rows": 1})
"""


class ScriptParams(BaseModel):
    """What `dg scaffold defs crater_dagster.components.CraterScriptComponent NAME` may be given."""

    script: Annotated[str, Field(description="File name of the script.")] = "script.py"
    asset_key: Annotated[str | None, Field(description="The asset it makes; default: the folder's name.")] = None
    gpu: Annotated[float, Field(description="Devices, or a share of one: 0.25.")] = 0
    cpu: Annotated[float, Field(description="Cores.")] = 1
    memory: Annotated[str, Field(description="With its unit: 2GiB.")] = "1GiB"


class ScriptScaffolder(dg.Scaffolder[ScriptParams]):
    """Writes a `defs.yaml` and a script that materialises its asset as it stands."""

    @classmethod
    def get_scaffold_params(cls) -> type[ScriptParams]:
        return ScriptParams

    def scaffold(self, request: dg.ScaffoldRequest[ScriptParams]) -> None:
        wanted = request.params
        resources: dict[str, Any] = {"cpu": wanted.cpu, "memory": wanted.memory}
        if wanted.gpu:
            resources["gpu"] = wanted.gpu
        attributes = {
            "script": wanted.script,
            "assets": [{"key": wanted.asset_key or request.target_path.name}],
            "resources": resources,
        }
        dg.scaffold_component(request, attributes)
        script = _inside(request.target_path, wanted.script)
        if not script.exists():
            script.write_text(SCRIPT)


@dg.scaffold_with(ScriptScaffolder)
class CraterScriptComponent(dg.Component, dg.Resolvable, dg.Model):
    """Assets that one script makes on a node with what it asks for; the step itself is a small task that follows it."""

    script: Annotated[str, Field(description="The script's path, from the folder of defs.yaml; nodes must have it there too.")]
    assets: Annotated[Sequence[dg.ResolvedAssetSpec], Field(description="What the script materialises.")]
    args: Annotated[Sequence[str], Field(description="Further arguments of the script.")] = ()
    python: Annotated[str, Field(description="The node's interpreter.")] = "python"
    resources: Annotated[Mapping[str, Any], Field(description="cpu, memory, disk, gpu, gpu_memory, gpu_devices, gpu_type.")] = {}
    env: Annotated[Mapping[str, str], Field(description="Plain settings; secrets belong to an env_profile of the node.")] = {}
    extras: Annotated[Mapping[str, Any], Field(description="What the script finds in its Pipes context.")] = {}
    pool: Annotated[str | Sequence[str] | None, Field(description="Pools to take it from.")] = None
    options: Annotated[
        Mapping[str, Any],
        Field(description="Further fields of the task: project, priority, quota_policy, time_limit, env_profile, ..."),
    ] = {}
    op_name: Annotated[str | None, Field(description="Name of the step; default: the script's name.")] = None

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(description=(cls.__doc__ or "").strip(), tags=["crater", "pipes"])

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        script = _inside(Path(context.path), self.script)
        if not script.is_file():
            raise dg.DagsterInvalidDefinitionError(f"script: there is no file {self.script} in {context.path}")
        task = self._task()
        pipes = PipesCraterClient()

        @dg.multi_asset(
            name=self.op_name or script.stem.replace("-", "_").replace(".", "_"),
            specs=[spec.merge_attributes(kinds={"crater", "python"}) for spec in self.assets],
            op_tags=crater_tags(cpu=0.25, memory="512MiB"),
        )
        def made_by_script(context):  # Without annotations: Dagster reads them, and here they would be texts to it.
            done = pipes.run(
                context=context, command=[self.python, str(script), *self.args], extras=dict(self.extras), pool=self.pool, **task
            )
            return done.get_results()

        return dg.Definitions(assets=[made_by_script])

    def _task(self) -> dict[str, Any]:
        """Checked when the code is loaded, as `crater_tags` is."""
        task = merge(self.options, {"resources": dict(self.resources), "env": dict(self.env)})
        try:
            submission({**task, "pools": pools_of(self.pool) or []}, name="check", command=(self.python, self.script))
        except InvalidRequest as error:
            raise dg.DagsterInvalidDefinitionError(f"CraterScriptComponent: {error.message}") from None
        return task


def _inside(folder: Path, name: str) -> Path:
    """A script belongs to its component: one that lies elsewhere would change without it."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise dg.DagsterInvalidDefinitionError(f"script: {name} is not in the component's folder {folder}")
    return path
