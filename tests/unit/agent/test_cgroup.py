"""Where cgroups are, and what is written to them: both versions, on a tree of ordinary files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crater_agent.cgroup import Limits, Mount, memory_limit_bytes, open_cgroups, read_mounts, read_own

LIMITS = Limits(cpu_milli=1500, memory_bytes=10**9, pids_max=100)


def _proc(tmp_path: Path, mountinfo: str, cgroup: str) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mountinfo").write_text(mountinfo)
    (proc / "cgroup").write_text(cgroup)
    return proc


def _files(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def _v2(tmp_path: Path, own: str, controllers: str, procs: str = "", delegated: str | None = None) -> Path:
    root = _files(tmp_path / "sys", cgroup__controllers=controllers, cgroup__subtree_control="", cgroup__procs="")
    home = root / own.lstrip("/")
    _files(home, cgroup__procs=procs, cgroup__subtree_control="")
    if own != "/":
        _files(home, cgroup__type="domain\n", cgroup__controllers=controllers if delegated is None else delegated)
    # The kernel fills a new directory; here it has to be there before.
    names = ("cpu.max", "cpu.weight", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cgroup.procs")
    _files(home / "agent", cgroup__procs="")
    _files(home / "crater-n1", cgroup__subtree_control="")
    _files(home / "crater-n1" / "a", **{name.replace(".", "__"): "" for name in names})
    return _proc(tmp_path, f"30 20 0:26 / {root} rw - cgroup2 cgroup2 rw\n", f"0::{own}\n")


def test_mounts_of_both_versions_are_read(tmp_path: Path):
    unified = _files(tmp_path / "u", cgroup__controllers="cpu memory pids\n")
    mounts = read_mounts(
        f"24 1 0:1 / /proc rw - proc proc rw\n"
        f"30 20 0:26 / {unified} rw - cgroup2 cgroup2 rw\n"
        f"31 20 0:27 /docker/x /sys/fs/cgroup/cpu,cpuacct rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
    )
    assert mounts[0] == Mount("/", unified, frozenset({"cpu", "memory", "pids"}), 2)
    assert mounts[1].root == "/docker/x"
    assert {"cpu", "cpuacct"} <= mounts[1].controllers


def test_own_paths_are_read_for_each_controller():
    assert read_own("4:memory:/a/b\n2:cpu,cpuacct:/c\n0::/d\n") == {"memory": "/a/b", "cpu": "/c", "cpuacct": "/c", "": "/d"}


def test_version_2_moves_the_agent_down_and_sets_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    proc = _v2(tmp_path, "/system.slice/crater-agent.service", "cpu memory pids io\n", f"{os.getpid()}\n")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    groups, why = open_cgroups("crater-n1", proc)
    assert (groups is not None and groups.version, why) == (2, "")
    assert groups.no_restart.startswith("a service manager cannot start a process in a group that has been divided")
    home = tmp_path / "sys/system.slice/crater-agent.service"
    assert (home / "agent/cgroup.procs").read_text() == str(os.getpid())
    assert (home / "cgroup.subtree_control").read_text() == "+cpu +memory +pids +io"
    group = groups.create("a", LIMITS)
    read = {path.name: path.read_text() for path in (home / "crater-n1/a").iterdir()}
    assert read["cpu.max"] == "150000 100000"
    assert (read["memory.max"], read["memory.swap.max"], read["memory.oom.group"], read["pids.max"]) == (
        "1000000000",
        "0",
        "1",
        "100",
    )
    assert 1 <= int(read["cpu.weight"]) <= 10_000
    assert group.procs_files == (str(home / "crater-n1/a/cgroup.procs"),)


def test_version_2_counts_without_the_cache_that_can_be_dropped(tmp_path: Path):
    groups, _ = open_cgroups("crater-n1", _v2(tmp_path, "/", "cpu memory pids\n"))
    assert groups is not None
    _files(
        tmp_path / "sys/crater-n1/a",
        memory__current="1000\n",
        memory__stat="anon 600\ninactive_file 300\n",
        memory__peak="1500\n",
        memory__events="oom 2\noom_kill 1\n",
        cpu__stat="usage_usec 2500000\n",
    )
    counters = groups.group("a").counters()
    assert (counters.cpu_ms, counters.memory_bytes, counters.memory_max_bytes, counters.oom_kills) == (2500, 700, 1500, 1)


def test_a_weight_alone_for_what_must_start_at_once(tmp_path: Path):
    groups, _ = open_cgroups("crater-n1", _v2(tmp_path, "/", "cpu memory pids\n"))
    assert groups is not None
    groups.create("a", Limits(cpu_milli=100, cpu_hard=False))
    assert (tmp_path / "sys/crater-n1/a/cpu.max").read_text() == ""


def test_a_group_without_controllers_is_left_for_the_root_and_nothing_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    proc = _v2(tmp_path, "/system.slice/agent.service", "cpu memory pids\n", f"{os.getpid()}\n", delegated="memory pids\n")
    home = tmp_path / "sys/system.slice/agent.service"
    _files(tmp_path / "sys/crater-n1", cgroup__subtree_control="")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    groups, why = open_cgroups("crater-n1", proc)
    assert (groups is not None, why) == (True, "")
    assert ((home / "agent/cgroup.procs").read_text(), (home / "cgroup.subtree_control").read_text()) == ("", "")
    assert (tmp_path / "sys/crater-n1/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    groups, why = open_cgroups("crater-n1", proc)
    assert (groups, why) == (None, f"cgroup v2: {home} has not been given cpu: run the agent as a service with Delegate=yes")


def test_an_agent_that_root_started_stays_out_of_the_group_that_it_is_started_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    proc = _v2(tmp_path, "/system.slice/crater-agent.service", "cpu memory pids\n", f"{os.getpid()}\n")
    _files(tmp_path / "sys/crater-n1", cgroup__subtree_control="")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    groups, why = open_cgroups("crater-n1", proc)
    assert groups is not None, why
    assert groups.no_restart == ""
    assert (tmp_path / "sys/crater-n1/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (tmp_path / "sys/system.slice/crater-agent.service/cgroup.subtree_control").read_text() == ""


@pytest.mark.parametrize("user", [0, 1000])
def test_an_agent_that_was_started_below_its_own_group_divides_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int
):
    proc = _v2(tmp_path, "/system.slice/crater-agent.service", "cpu memory pids\n")
    home = tmp_path / "sys/system.slice/crater-agent.service"
    _files(home / "agent", cgroup__type="domain\n", cgroup__procs=f"{os.getpid()}\n")
    (proc / "cgroup").write_text("0::/system.slice/crater-agent.service/agent\n")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    groups, why = open_cgroups("crater-n1", proc)
    assert groups is not None, why
    assert groups.no_restart == ""
    assert (home / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (home / "crater-n1/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_the_root_that_a_container_sees_is_emptied_before_it_is_divided(tmp_path: Path):
    proc = _v2(tmp_path, "/", "cpu memory pids\n", f"{os.getpid()}\n")
    _files(tmp_path / "sys", cgroup__type="domain\n", cgroup__procs=f"{os.getpid()}\n")
    groups, why = open_cgroups("crater-n1", proc)
    assert groups is not None, why
    assert groups.no_restart == ""
    assert (tmp_path / "sys/agent/cgroup.procs").read_text() == str(os.getpid())


def test_a_missing_controller_is_named(tmp_path: Path):
    groups, why = open_cgroups("crater-n1", _v2(tmp_path, "/", "cpu pids\n"))
    assert (groups, "no memory controller" in why) == (None, True)


def test_without_any_cgroup_the_reason_is_said(tmp_path: Path):
    groups, why = open_cgroups("crater-n1", _proc(tmp_path, "24 1 0:1 / /proc rw - proc proc rw\n", ""))
    assert (groups, why) == (None, "no cpu controller is mounted")


def test_the_limit_of_a_container_is_what_the_machine_has(tmp_path: Path):
    memory = _files(tmp_path / "memory", memory__limit_in_bytes="8000000000\n")
    proc = _proc(tmp_path, f"31 20 0:27 /docker/x {memory} rw - cgroup cgroup rw,memory\n", "4:memory:/docker/x\n")
    assert memory_limit_bytes(proc) == 8_000_000_000
