"""`CraterServiceAutoscalerComponent`: a sensor that scales one service by a rule."""

from __future__ import annotations

from typing import Annotated

import dagster as dg
from pydantic import BaseModel, Field

from crater_core.errors import BadConfiguration, InvalidRequest
from crater_core.lifecycle.autoscale import AutoscaleRule
from crater_core.model.units import parse_duration_ms
from crater_dagster.autoscale import INTERVAL_S, build_autoscale_sensor


class AutoscalerParams(BaseModel):
    """What `dg scaffold defs crater_dagster.components.CraterServiceAutoscalerComponent NAME` may be given."""

    service: Annotated[str | None, Field(description="The service's name; default: the folder's name.")] = None
    replicas_min: int = 2
    replicas_max: int = 10


class AutoscalerScaffolder(dg.Scaffolder[AutoscalerParams]):
    @classmethod
    def get_scaffold_params(cls) -> type[AutoscalerParams]:
        return AutoscalerParams

    def scaffold(self, request: dg.ScaffoldRequest[AutoscalerParams]) -> None:
        attributes = request.params.model_dump()
        dg.scaffold_component(request, {**attributes, "service": request.params.service or request.target_path.name})


@dg.scaffold_with(AutoscalerScaffolder)
class CraterServiceAutoscalerComponent(dg.Component, dg.Resolvable, dg.Model):
    """Scales a service: up above a CPU use that lasts, down below one that lasts longer, with a pause between two changes."""

    service: Annotated[str, Field(description="The service's name.")]
    replicas_min: int = 2
    replicas_max: int = 10
    up_above_percent: float = 70
    up_for: Annotated[str, Field(description="How long it must be above: 2m.")] = "2m"
    down_below_percent: float = 30
    down_for: str = "5m"
    cooldown: Annotated[str, Field(description="Pause between two changes.")] = "3m"
    sensor_name: str | None = None
    running: Annotated[bool, Field(description="Whether the sensor runs unless a person stops it.")] = True

    @classmethod
    def get_spec(cls) -> dg.ComponentTypeSpec:
        return dg.ComponentTypeSpec(description=(cls.__doc__ or "").strip(), tags=["crater", "sensor"])

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        status = dg.DefaultSensorStatus.RUNNING if self.running else dg.DefaultSensorStatus.STOPPED
        sensor = build_autoscale_sensor(
            self.service, self._rule(), name=self.sensor_name, minimum_interval_seconds=INTERVAL_S, default_status=status
        )
        return dg.Definitions(sensors=[sensor])

    def _rule(self) -> AutoscaleRule:
        try:
            return AutoscaleRule(
                replicas_min=self.replicas_min,
                replicas_max=self.replicas_max,
                up_above_percent=self.up_above_percent,
                up_for_ms=parse_duration_ms(self.up_for, "up_for"),
                down_below_percent=self.down_below_percent,
                down_for_ms=parse_duration_ms(self.down_for, "down_for"),
                cooldown_ms=parse_duration_ms(self.cooldown, "cooldown"),
            )
        except (BadConfiguration, InvalidRequest) as error:
            raise dg.DagsterInvalidDefinitionError(f"CraterServiceAutoscalerComponent: {error.message}") from None
