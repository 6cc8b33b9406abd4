"""What is asked of the engine, and which images may be."""

from __future__ import annotations

import os

import pytest

from crater_agent.docker_engine import facts_of
from crater_agent.docker_spec import (
    Bind,
    EngineFacts,
    Image,
    container_environment,
    creation,
    mps_binds,
    mps_user,
    refuse_image,
    registry_of,
    with_tag,
)
from crater_agent.environment import Host
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import Lease
from crater_core.wire.resources import GrantView


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("busybox", "docker.io"),
        ("team/tool:2", "docker.io"),
        ("ghcr.io/team/tool@sha256:0", "ghcr.io"),
        ("10.0.0.1:5000/tool", "10.0.0.1:5000"),
        ("localhost/tool", "localhost"),
    ],
)
def test_the_registry_is_read_from_an_images_name_by_dockers_rule(image: str, registry: str):
    assert registry_of(image) == registry


def test_without_a_tag_latest_is_meant():
    assert [with_tag(name) for name in ("a", "h:5000/a", "a:1", "a@sha256:0")] == [
        "a:latest",
        "h:5000/a:latest",
        "a:1",
        "a@sha256:0",
    ]


def test_the_list_of_images_is_compared_with_and_without_the_tag():
    refuse_image("ghcr.io/team/tool", ["ghcr.io/team/*"])
    refuse_image("tool", ["tool:latest"])
    refuse_image("anything", [])
    with pytest.raises(RuntimeFailed, match=r"docker\.images: ghcr\.io/team/\*"):
        refuse_image("ghcr.io/teamwork/tool", ["ghcr.io/team/*"])


def test_an_engine_is_known_by_what_it_lists():
    facts = facts_of({"ServerVersion": "29", "CpuCfsQuota": True, "DiscoveredDevices": [{"ID": "nvidia.com/gpu=GPU-a"}]})
    assert (facts.version, facts.cpu_quota, facts.cdi_devices) == ("29", True, frozenset({"nvidia.com/gpu=GPU-a"}))
    assert facts_of({}).cdi_devices == frozenset()


def test_an_mps_client_finds_its_daemon_in_the_container_as_the_servers_user():
    share = GrantView(uuid="GPU-a", index=2, compute_milli=500, memory_mib=1_024, sharing="mps")
    lease = Lease(
        allocation="a", task="t", token=1, name="n", project="p", user="u", attempt=1, member=0, members=1, cpu_milli=0,
        memory_bytes=0, disk_bytes=0, grace_ms=0, command=["true"], devices=[share], image="busybox", shm_bytes=2**30,
    )  # fmt: skip
    env = container_environment(lease, Host("n1", "/bin", "/root", mps_root="/run/x"), "/scratch", {}, None)
    assert mps_binds(lease, env) == [Bind("/run/x/2/pipe", "/run/x/2/pipe", read_only=False)]
    identity = mps_user(lease, None)
    asked = creation(
        lease, Image("i"), EngineFacts(), env=env, binds=mps_binds(lease, env), scratch="/scratch", labels={}, identity=identity
    )
    assert asked["User"] == f"{os.geteuid()}:{os.getegid()}"
    assert asked["HostConfig"]["IpcMode"] == "host"
    assert "ShmSize" not in asked["HostConfig"]
    assert asked["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == ["GPU-a"]
    assert {"CUDA_MPS_PIPE_DIRECTORY=/run/x/2/pipe", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=1024M"} <= set(asked["Env"])
    sliced = lease.model_copy(update={"devices": [share.model_copy(update={"sharing": "time_slice"})]})
    env = container_environment(sliced, Host("n1", "/bin", "/root", mps_root="/run/x"), "/scratch", {}, None)
    assert (mps_binds(sliced, env), mps_user(sliced, None)) == ([], None)
    asked = creation(sliced, Image("i"), EngineFacts(), env=env, binds=[], scratch="/scratch", labels={})
    assert "IpcMode" not in asked["HostConfig"]
    assert asked["HostConfig"]["ShmSize"] == 2**30
