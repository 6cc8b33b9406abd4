"""What a workload is told, and what it never gets to see."""

from __future__ import annotations

from pathlib import Path

import pytest

from crater_agent.config import FromEnv, FromFile
from crater_agent.environment import Host, arguments, environment, find_program
from crater_agent.mounts import Bind, binds_of
from crater_agent.warm import template_for
from crater_core.errors import RuntimeFailed
from crater_core.wire.agents import Lease, MountView
from crater_core.wire.resources import GrantView


def _lease(**fields: object) -> Lease:
    base: dict[str, object] = {
        "allocation": "a",
        "task": "t",
        "token": 1,
        "name": "n",
        "project": "p",
        "user": "u",
        "attempt": 1,
        "member": 0,
        "members": 1,
        "command": ["true"],
        "cpu_milli": 2500,
        "memory_bytes": 1,
        "disk_bytes": 0,
    }
    return Lease.model_validate({**base, **fields})


def _host(tmp_path: Path) -> Host:
    (tmp_path / "secret").write_text("from-file\n")
    profile = {"PLAIN": "x", "OWN": "profile", "TOKEN": FromEnv(env="AGENT_SECRET"), "KEY": FromFile(file=tmp_path / "secret")}
    return Host("n1", "/venv/bin", "/home/u", "UTC", {"training": profile})


def test_a_profile_comes_before_the_task_and_the_grant_after_it(tmp_path: Path):
    lease = _lease(env_profile="training", env={"OWN": "task", "CRATER_NODE": "forged", "OMP_NUM_THREADS": "7"})
    env = environment(lease, _host(tmp_path), "/scratch/a", {"AGENT_SECRET": "s", "CRATER_TOKEN": "never"})
    assert (env["PLAIN"], env["OWN"], env["TOKEN"], env["KEY"]) == ("x", "task", "s", "from-file")
    assert (env["CRATER_NODE"], env["OMP_NUM_THREADS"], env["TZ"]) == ("n1", "7", "UTC")
    assert "CRATER_TOKEN" not in env


def test_what_a_profile_needs_and_the_node_lacks_is_said_without_any_value(tmp_path: Path):
    with pytest.raises(RuntimeFailed, match="environment profile 'training': the agent's environment has no AGENT_SECRET"):
        environment(_lease(env_profile="training"), _host(tmp_path), "/s", {})


def test_cuda_sees_real_devices_by_uuid_and_no_simulated_one(tmp_path: Path):
    real = GrantView(uuid="GPU-a", index=3, compute_milli=500, memory_mib=10_000, sharing="time_slice")
    fake = GrantView(uuid="GPU-SIM-n1-0", index=0, compute_milli=500, memory_mib=10_000, sharing="mps", simulated=True)
    with_real = environment(_lease(devices=[real]), _host(tmp_path), "/s", {})
    with_fake = environment(_lease(devices=[fake]), _host(tmp_path), "/s", {})
    without = environment(_lease(), _host(tmp_path), "/s", {})
    assert (with_real["CUDA_VISIBLE_DEVICES"], "CRATER_SIMULATED_GPU" in with_real) == ("GPU-a", False)
    assert (with_fake["CUDA_VISIBLE_DEVICES"], with_fake["CRATER_SIMULATED_GPU"]) == ("", "1")
    assert (without["CUDA_VISIBLE_DEVICES"], "CRATER_GPU_MEMORY_MIB" in without) == ("", False)


def _gpu(uuid: str, index: int, sharing: str = "exclusive") -> GrantView:
    return GrantView(uuid=uuid, index=index, compute_milli=1000, memory_mib=10_000, sharing=sharing)


@pytest.mark.parametrize(
    ("form", "sees_all", "devices", "visible"),
    [
        ("uuid", True, [_gpu("GPU-f", 5), _gpu("GPU-e", 4)], "GPU-f,GPU-e"),
        ("uuid", False, [_gpu("GPU-f", 5), _gpu("GPU-e", 4)], "GPU-f,GPU-e"),
        # Where it sees its own only, CUDA counts them from 0, whatever their numbers on the node are.
        ("index", False, [_gpu("GPU-f", 5), _gpu("GPU-e", 4)], "1,0"),
        ("index", True, [_gpu("GPU-f", 5), _gpu("GPU-e", 4)], "5,4"),
        ("index", False, [_gpu("MIG-b", 3, "mig")], "0"),
        ("index", False, [], ""),
        ("index", True, [], ""),
    ],
)
def test_gpus_are_named_by_uuid_or_as_cuda_counts_what_the_task_can_open(tmp_path: Path, form, sees_all, devices, visible):
    # Neither the task nor the agent's own environment has a say in it.
    lease = _lease(
        devices=devices, gpu_visible_devices=form, env={"CUDA_VISIBLE_DEVICES": "7", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    )
    own = {"CUDA_VISIBLE_DEVICES": "6,7", "NVIDIA_VISIBLE_DEVICES": "all"}
    env = environment(lease, _host(tmp_path), "/s", own, sees_all_gpus=sees_all)
    assert (env["CUDA_VISIBLE_DEVICES"], env["CUDA_DEVICE_ORDER"]) == (visible, "PCI_BUS_ID")
    assert "NVIDIA_VISIBLE_DEVICES" not in env


def test_a_slice_has_no_index_among_cards_that_are_not_hidden(tmp_path: Path):
    lease = _lease(devices=[_gpu("MIG-b", 3, "mig")], gpu_visible_devices="index")
    with pytest.raises(RuntimeFailed, match=r"a MIG slice has no index .* set gpu_visible_devices to uuid"):
        environment(lease, _host(tmp_path), "/s", {}, sees_all_gpus=True)


def test_the_granted_amounts_are_of_each_device(tmp_path: Path):
    shares = [
        GrantView(uuid=uuid, index=0, compute_milli=milli, memory_mib=mib, sharing="time_slice")
        for uuid, milli, mib in (("GPU-a", 500, 10_000), ("GPU-b", 400, 12_000))
    ]
    env = environment(_lease(devices=shares, env={"CRATER_GPU_MEMORY_MIB": "1"}), _host(tmp_path), "/s", {})
    assert {name: value for name, value in env.items() if name.startswith("CRATER_GPU")} == {
        "CRATER_GPU_UUIDS": "GPU-a,GPU-b",
        "CRATER_GPU_MEMORY_MIB": "10000",
        "CRATER_GPU_COMPUTE_MILLI": "400",
    }
    part = GrantView(uuid="MIG-a", index=0, compute_milli=1000, memory_mib=9_728, sharing="mig", card_milli=142)
    env = environment(_lease(devices=[part]), _host(tmp_path), "/s", {})
    assert env["CRATER_GPU_COMPUTE_MILLI"] == "142", "in thousandths of a card, as its hours are counted"


def test_a_port_is_put_in_where_it_is_asked_for():
    assert arguments(_lease(command=["serve", "--port={port}", "{x}"], ports=[20_001, 20_002])) == [
        "serve",
        "--port=20001",
        "{x}",
    ]
    assert arguments(_lease(command=["echo", "{port}"])) == ["echo", "{port}"]


def test_a_program_is_looked_up_on_the_path_of_the_task(tmp_path: Path):
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(RuntimeFailed, match="mine is not executable"):
        find_program("mine", str(tmp_path), "/")
    program.chmod(0o755)
    assert find_program("mine", f"/nowhere:{tmp_path}", "/") == str(program)
    assert find_program("./mine", "", str(tmp_path)) == str(program)
    with pytest.raises(RuntimeFailed, match="other was not found on the task's PATH"):
        find_program("other", str(tmp_path), "/")


def test_a_mount_stays_inside_the_roots_and_needs_rights_where_it_moves(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "out").symlink_to("/etc")
    there = str(tmp_path / "data")
    in_place = MountView(source=there, target=there, read_only=False)
    elsewhere = in_place.model_copy(update={"target": "/workspace", "read_only": True})
    escape = MountView(source=str(tmp_path / "out"), target="/workspace", read_only=True)
    roots = (tmp_path,)
    assert binds_of([in_place], roots, no_rights="not root") == ()
    assert binds_of([in_place, elsewhere], roots) == (Bind(there, "/workspace", True),)
    with pytest.raises(RuntimeFailed, match="cannot be shown at /workspace: not root"):
        binds_of([elsewhere], roots, no_rights="not root")
    with pytest.raises(RuntimeFailed, match="outside this node's mount_roots"):
        binds_of([escape], roots)
    with pytest.raises(RuntimeFailed, match="/workspace is mounted twice"):
        binds_of([elsewhere, elsewhere], roots)


def test_a_template_knows_the_profile_and_nothing_of_one_task(tmp_path: Path):
    host = Host("n1", "/venv/bin", "/home/u", "UTC", {"dagster": {"DAGSTER_HOME": "/d", "CRATER_ENDPOINT": "http://s"}})
    first, second = (
        template_for(
            _lease(allocation=name, task=name, env={"OWN": name}, env_profile="dagster", warm_preload=["heavy"], ports=[20_000]),
            host,
            "/venv/bin/python",
            {},
        )
        for name in ("a", "b")
    )
    assert first is not None
    assert first == second, "two tasks of a kind share one template"
    assert (first["env"]["DAGSTER_HOME"], first["env"]["CRATER_ENDPOINT"]) == ("/d", "http://s")
    assert [name for name in first["env"] if name.startswith("CRATER_")] == ["CRATER_ENDPOINT"]
    assert first["argv"] == ["/venv/bin/python", "-m", "crater_agent.template", "heavy"]
    assert "OWN" not in first["env"]


def test_a_task_that_asks_for_no_template_gets_none(tmp_path: Path):
    assert template_for(_lease(), _host(tmp_path), "/usr/bin/true", {}) is None


def test_members_of_a_gang_find_each_other_and_torchrun_starts_unchanged(tmp_path: Path):
    gang = {"gang": {"members": 3, "address": "10.0.0.7", "port": 20_005}, "member": 2, "members": 3}
    devices = [GrantView(uuid=f"GPU-{i}", index=i, compute_milli=1000, memory_mib=1, sharing="exclusive") for i in range(4)]
    env = environment(_lease(**gang, devices=devices), _host(tmp_path), "/s", {})
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["WORLD_SIZE"], env["RANK"]) == ("10.0.0.7", "20005", "3", "2")
    assert (env["PET_NNODES"], env["PET_NODE_RANK"], env["PET_NPROC_PER_NODE"]) == ("3", "2", "4")
    assert (env["CRATER_GANG_ADDRESS"], env["CRATER_GANG_PORT"], env["CRATER_MEMBERS"]) == ("10.0.0.7", "20005", "3")
    own = environment(_lease(**gang, env={"WORLD_SIZE": "12", "CRATER_GANG_PORT": "1"}), _host(tmp_path), "/s", {})
    assert (own["WORLD_SIZE"], own["CRATER_GANG_PORT"]) == ("12", "20005")
    assert "MASTER_ADDR" not in environment(_lease(), _host(tmp_path), "/s", {})
