"""What reaches the engine for what this machine does not have: GPUs, by UUID, each way that engines hand them out."""

from __future__ import annotations

from pathlib import Path

from agent_harness import SchedulerStandIn, poll_until
from engine_stand_in import engine_stand_in

from crater_core.wire.resources import GrantView

A, B = "GPU-aaaaaaaa-0000-1111-2222-333333333333", "GPU-bbbbbbbb-0000-1111-2222-333333333333"


def _grant(uuid: str, simulated: bool = False) -> GrantView:
    return GrantView(uuid=uuid, index=0, compute_milli=1000, memory_mib=1000, sharing="exclusive", simulated=simulated)


def _environment(body: dict[str, list[str]]) -> dict[str, str]:
    return dict(line.split("=", 1) for line in body["Env"])


def test_gpus_are_asked_for_by_uuid_and_a_task_without_one_sees_none(start, place: Path, scheduler: SchedulerStandIn):
    with engine_stand_in(place / "engine.sock") as engine:
        start(docker={"socket": str(place / "engine.sock")})
        scheduler.give("two", ["train"], image="tool:1", devices=[_grant(A), _grant(B)], shm_bytes=2**30, cpu_milli=1500)
        assert scheduler.final("two").status == "succeeded"
        scheduler.give("none", ["train"], image="tool:1", devices=[_grant("GPU-SIM-n1-0", simulated=True)])
        assert scheduler.final("none").status == "succeeded"
    two, none = engine.created
    assert two["HostConfig"]["DeviceRequests"] == [{"Driver": "nvidia", "DeviceIDs": [A, B], "Capabilities": [["gpu"]]}]
    assert (_environment(two)["CUDA_VISIBLE_DEVICES"], _environment(two)["NVIDIA_VISIBLE_DEVICES"]) == (f"{A},{B}", f"{A},{B}")
    assert (two["HostConfig"]["ShmSize"], two["HostConfig"]["NanoCpus"]) == (2**30, 1_500_000_000)
    assert (two["Entrypoint"], two["WorkingDir"], two["HostConfig"]["Init"]) == (["train"], "/w", True)
    assert "DeviceRequests" not in none["HostConfig"]
    assert (_environment(none)["CUDA_VISIBLE_DEVICES"], _environment(none)["NVIDIA_VISIBLE_DEVICES"]) == ("", "void")


def test_in_a_container_cuda_counts_from_0_whatever_the_nodes_numbers_are(start, place: Path, scheduler: SchedulerStandIn):
    own = {"CUDA_VISIBLE_DEVICES": "6,7", "NVIDIA_VISIBLE_DEVICES": "all"}
    grants = [_grant(uuid).model_copy(update={"index": index}) for uuid, index in ((B, 7), (A, 6))]
    with engine_stand_in(place / "engine.sock") as engine:
        start(docker={"socket": str(place / "engine.sock")}, environ=own)
        scheduler.give("a", ["train"], image="tool:1", devices=grants, gpu_visible_devices="index")
        assert scheduler.final("a").status == "succeeded"
    env = _environment(engine.created[0])
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"], env["NVIDIA_VISIBLE_DEVICES"]) == (
        "1,0",
        "PCI_BUS_ID",
        f"{B},{A}",
    )
    assert (env["CRATER_GPU_UUIDS"], env["CRATER_GPU_MEMORY_MIB"], env["CRATER_GPU_COMPUTE_MILLI"]) == (
        f"{B},{A}",
        "1000",
        "1000",
    )
    assert engine.created[0]["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == [B, A]


def test_cdi_is_used_where_the_engine_lists_every_device_by_uuid(start, place: Path, scheduler: SchedulerStandIn):
    listed = {"DiscoveredDevices": [{"Source": "cdi", "ID": f"nvidia.com/gpu={uuid}"} for uuid in (A, "all")]}
    with engine_stand_in(place / "engine.sock", info=listed) as engine:
        start(docker={"socket": str(place / "engine.sock")})
        scheduler.give("listed", ["train"], image="tool:1", devices=[_grant(A)])
        assert scheduler.final("listed").status == "succeeded"
        scheduler.give("other", ["train"], image="tool:1", devices=[_grant(B)])
        assert scheduler.final("other").status == "succeeded"
    requests = [body["HostConfig"]["DeviceRequests"] for body in engine.created]
    assert requests[0] == [{"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={A}"]}]
    assert requests[1][0]["Driver"] == "nvidia"


def test_an_engine_without_the_toolkit_is_the_nodes_fault_and_says_what_is_missing(start, place: Path, scheduler):
    refusal = 'could not select device driver "nvidia" with capabilities: [[gpu]]'
    with engine_stand_in(place / "engine.sock", refuse_start=refusal):
        start(docker={"socket": str(place / "engine.sock")})
        scheduler.give("a", ["train"], image="tool:1", devices=[_grant(A)])
        facts = scheduler.final("a").reason.facts
    assert (facts["retryable"], "the NVIDIA Container Toolkit is not set up" in facts["why"]) == (1, True)


def test_ports_are_published_under_their_own_numbers_where_the_network_is_not_the_hosts(start, place: Path, scheduler):
    with engine_stand_in(place / "engine.sock") as engine:
        start(docker={"socket": str(place / "engine.sock"), "network": "bridge"})
        scheduler.give("a", ["serve", "--port", "{port}"], image="tool:1", ports=[20_007])
        assert scheduler.final("a").status == "succeeded"
    body = engine.created[0]
    assert body["HostConfig"]["PortBindings"] == {"20007/tcp": [{"HostPort": "20007"}]}
    assert (body["HostConfig"]["NetworkMode"], body["Entrypoint"]) == ("bridge", ["serve", "--port", "20007"])


def test_an_engine_that_says_no_to_this_user_or_cannot_hold_a_quota_is_told_as_a_note(start, place: Path, scheduler):
    with engine_stand_in(place / "engine.sock", info={"CpuCfsQuota": False}) as engine:
        start(docker={"socket": str(place / "engine.sock")})
        scheduler.give("a", ["x"], image="tool:1")
        assert scheduler.final("a").status == "succeeded"
        assert any("holds no CPU quota" in note for note in scheduler.declaration.notes)
        assert "NanoCpus" not in engine.created[0]["HostConfig"]
        assert engine.created[0]["HostConfig"]["CpuShares"] == 512
    poll_until(lambda: scheduler.declarations[-1].runtimes == ("process",), 30, "the engine no longer offered")
