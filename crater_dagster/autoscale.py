"""`build_autoscale_sensor(...)`: scales a service by a pure rule; each tick says what it saw and why it did what it did."""

from __future__ import annotations

from dagster import DefaultSensorStatus, SensorDefinition, SensorEvaluationContext, SensorResult, SkipReason

from crater_core.client import CraterClient
from crater_core.clock import Clock, SystemClock
from crater_core.errors import CraterError, InvalidRequest, NotFound
from crater_core.lifecycle.autoscale import AutoscaleRule, AutoscaleState, Decision, Sample, decide
from crater_dagster.connect import client_of

INTERVAL_S = 15
PATIENCE_S = 5.0
"""A tick is a moment: when no scheduler answers, the next one tries again."""


def build_autoscale_sensor(
    service_name: str,
    rule: AutoscaleRule | None = None,
    *,
    name: str | None = None,
    minimum_interval_seconds: int = INTERVAL_S,
    default_status: DefaultSensorStatus = DefaultSensorStatus.STOPPED,
    description: str | None = None,
    clock: Clock | None = None,
) -> SensorDefinition:
    """A sensor that looks at the service's CPU use and sets its number of replicas; it launches no runs.

    The rule remembers in the sensor's cursor. Without measurements, or when no scheduler answers, nothing changes.
    """
    rule, clock = rule or AutoscaleRule(), clock or SystemClock()

    def tick(context: SensorEvaluationContext) -> SensorResult:
        state, told = _state(context)
        try:
            with client_of(context.instance, retry_for_s=PATIENCE_S, timeout_s=PATIENCE_S) as client:
                state, why = _look_and_scale(context, client, service_name, rule, state, clock)
        except NotFound:
            why = f"There is no service {service_name}."
        except CraterError as error:
            why = f"Nothing changed: {error.message}"
        context.log.info(f"{service_name}: {told}{why}")
        return SensorResult(skip_reason=SkipReason(f"{told}{why}"), cursor=state.to_text())

    return SensorDefinition(
        name=name or f"{service_name.replace('-', '_').replace('.', '_')}_autoscale",
        evaluation_fn=tick,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description=description
        or f"Scales {service_name} from {rule.replicas_min} to {rule.replicas_max} replicas: up above "
        f"{rule.up_above_percent:g} % CPU, down below {rule.down_below_percent:g} %.",
    )


def _state(context: SensorEvaluationContext) -> tuple[AutoscaleState, str]:
    try:
        return AutoscaleState.from_text(context.cursor), ""
    except InvalidRequest:
        return AutoscaleState(), "The cursor was not this sensor's, and begins anew. "


def _look_and_scale(
    context: SensorEvaluationContext,
    client: CraterClient,
    service_name: str,
    rule: AutoscaleRule,
    state: AutoscaleState,
    clock: Clock,
) -> tuple[AutoscaleState, str]:
    view = client.service(service_name)
    if view.removed:
        return AutoscaleState(), "The service is being removed."
    after, decision = decide(rule, state, Sample(view.ready, view.replicas, view.cpu_percent), clock.now_ms())
    if decision.action == "none":
        return after, _with_numbers(decision)
    client.scale(service_name, decision.replicas_to, decision.why)
    return after, decision.why


def _with_numbers(decision: Decision) -> str:
    return f"{decision.why} {decision.replicas_to} replica(s)."
