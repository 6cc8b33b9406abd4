"""`CraterResourceComponent`: the scheduler as a resource, and a Pipes client beside it, for every asset of the project."""

from __future__ import annotations

from typing import Annotated

import dagster as dg
from pydantic import BaseModel, Field

from crater_dagster.pipes import PipesCraterClient
from crater_dagster.resource import CraterResource


class ResourceParams(BaseModel):
    """What `dg scaffold defs crater_dagster.components.CraterResourceComponent NAME` may be given."""

    endpoint: Annotated[str | None, Field(description="Where the scheduler is; default: CRATER_ENDPOINT.")] = None
    project: Annotated[str | None, Field(description="For tasks that name none.")] = None


class ResourceScaffolder(dg.Scaffolder[ResourceParams]):
    @classmethod
    def get_scaffold_params(cls) -> type[ResourceParams]:
        return ResourceParams

    def scaffold(self, request: dg.ScaffoldRequest[ResourceParams]) -> None:
        dg.scaffold_component(request, request.params.model_dump(exclude_none=True))


@dg.scaffold_with(ResourceScaffolder)
class CraterResourceComponent(dg.Component, dg.Resolvable, dg.Model):
    """The resources `crater` (submit, wait, scale, usage) and `pipes` (a program on allocated compute)."""

    endpoint: Annotated[str | None, Field(description="Where the scheduler is; default: CRATER_ENDPOINT.")] = None
    token_variable: Annotated[
        str | None, Field(description="Name of the variable with the token, read when a run needs it; default: CRATER_TOKEN.")
    ] = None
    project: Annotated[str | None, Field(description="For tasks and services that name none.")] = None
    resource_key: str = "crater"
    pipes_key: str = "pipes"

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(description=(cls.__doc__ or "").strip(), tags=["crater", "resource"])

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        token = dg.EnvVar(self.token_variable) if self.token_variable else None
        defaults = {"project": self.project} if self.project else {}
        return dg.Definitions(
            resources={
                self.resource_key: CraterResource(endpoint=self.endpoint, token=token, project=self.project),
                self.pipes_key: PipesCraterClient(endpoint=self.endpoint, token=token, **defaults),
            }
        )
