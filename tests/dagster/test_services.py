"""A service that is an asset, and the sensor that scales it, against a real scheduler and real replicas."""

from __future__ import annotations

import httpx
from dagster import AssetKey, DagsterInstance, SensorResult, build_sensor_context
from dagster_world import World
from harness import PATIENCE_S, SchedulerProcess, wait_until

from crater_core.clock import ManualClock
from crater_core.lifecycle.autoscale import AutoscaleRule, AutoscaleState
from crater_dagster import CraterResource, build_autoscale_sensor


def _tick(world: World, sensor, cursor: str | None = None) -> SensorResult:
    with build_sensor_context(instance=world.instance, cursor=cursor) as context:
        result = sensor._raw_fn(context)
    assert isinstance(result, SensorResult)
    return result


def _why(result: SensorResult) -> str:
    assert result.skip_reason is not None
    return result.skip_reason.skip_message or ""


def test_materialising_a_service_deploys_it_and_gives_its_addresses(world: World):
    run_id = world.launch("serving")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    event = world.instance.get_latest_materialization_event(AssetKey("served"))
    assert event is not None
    assert event.asset_materialization is not None
    urls = event.asset_materialization.metadata["crater/urls"].value
    assert len(urls) == 2
    assert all(httpx.get(f"{url}/health", trust_env=False).status_code == 200 for url in urls)
    replicas = world.client.service("served").replica_list
    assert {replica.node for replica in replicas if replica.ready} == {"n-left", "n-right"}


def test_the_sensor_scales_the_service_and_says_why(world: World):
    if not any(service.name == "served" for service in world.client.services()):
        assert world.finish(world.launch("serving")) == "SUCCESS"
    world.client.wait_service("served")
    world.client.scale("served", 3)
    world.client.wait_service("served")
    rule = AutoscaleRule(replicas_min=1, replicas_max=2)
    clock = ManualClock(1_000_000)
    sensor = build_autoscale_sensor("served", rule, clock=clock)
    cursor = AutoscaleState().to_text()
    wait_until(lambda: world.client.service("served").cpu_percent is not None, PATIENCE_S, "a sample of the replicas")
    result = _tick(world, sensor, cursor)
    assert "3 is outside of 1 to 2 replicas" in _why(result)
    assert world.client.service("served").replicas == 2
    assert AutoscaleState.from_text(result.cursor).wanted == 2


def test_a_tick_without_the_service_changes_nothing_and_says_so(world: World):
    result = _tick(world, build_autoscale_sensor("nowhere"))
    assert _why(result) == "There is no service nowhere."


def test_a_tick_without_a_scheduler_keeps_what_the_rule_remembers(world: World, scheduler: SchedulerProcess):
    remembered = AutoscaleState(seen_at_ms=5, wanted=2).to_text()
    scheduler.kill()
    try:
        result = _tick(world, build_autoscale_sensor("served"), remembered)
    finally:
        scheduler.start()
    assert _why(result).startswith("Nothing changed: no scheduler answered")
    assert result.cursor == remembered


def test_a_cursor_of_something_else_begins_anew(world: World):
    assert "begins anew" in _why(_tick(world, build_autoscale_sensor("nowhere"), "not ours"))


def test_the_sensors_interval_is_a_quarter_of_a_minute():
    assert build_autoscale_sensor("digits-service").minimum_interval_seconds == 15


def test_the_resource_submits_waits_and_asks_for_usage(world: World):
    crater = CraterResource(endpoint=world.client.endpoints[0], project="vision")
    done = crater.run(name="hello", command=["true"], resources={"cpu": 0.1, "memory": "64MiB"}, timeout_s=30)
    assert (done.status, done.project) == ("succeeded", "vision")
    assert "vision" in {row.key for row in crater.usage("project").rows}
    crater.client.close()


def test_a_step_uses_the_resource_with_its_nodes_own_settings(world: World):
    run_id = world.launch("resourceful")
    assert world.finish(run_id) == "SUCCESS", world.story(run_id)
    assert "ended as succeeded" in world.log_texts(run_id)


def test_an_ephemeral_instance_needs_no_launcher_of_ours(world: World, monkeypatch):
    monkeypatch.setenv("CRATER_ENDPOINT", world.client.endpoints[0])
    with DagsterInstance.ephemeral() as instance, build_sensor_context(instance=instance) as context:
        result = build_autoscale_sensor("nowhere")._raw_fn(context)
    assert _why(result) == "There is no service nowhere."
