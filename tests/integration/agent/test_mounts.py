"""A process sees paths of the node where its mounts say, only what the operator allows, and leaves no trace of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from agent_harness import SchedulerStandIn, as_ordinary_user, poll_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
Mounts = list[dict[str, object]]


def _mount(source: Path, target: str, read_only: bool = True) -> dict[str, object]:
    return {"source": str(source), "target": target, "read_only": read_only}


def _run(scheduler: SchedulerStandIn, name: str, script: str, mounts: Mounts, **fields: object) -> tuple[str, str]:
    """What it said on both streams, or why it could not be started."""
    scheduler.give(name, ["sh", "-c", script], mounts=mounts, **fields)
    end = scheduler.final(name)
    if end.reason.code == "start_failed":
        return "", str(end.reason.facts["why"])
    return scheduler.read_log_text(name), scheduler.read_log_text(name, "stderr")


@pytest.fixture
def data(place: Path) -> Path:
    """With a file system of its own inside, as large data sets have."""
    path = place / "data"
    (path / "more").mkdir(parents=True)
    (path / "rows").write_text("1\n2\n")
    path.chmod(0o777)
    return path


def _mounted(place: Path) -> list[str]:
    """What others mount meanwhile is not ours."""
    paths = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [path for path in paths if path.startswith((f"/crater-test-{os.getpid()}", str(place)))]


@as_root
def test_data_appear_where_the_task_wants_them_and_the_node_keeps_no_trace(start, scheduler: SchedulerStandIn, data: Path):
    agent = start(mount_roots=[str(data)], run_as="nobody")
    target = f"/crater-test-{os.getpid()}/deep/data"
    script = f"pwd; cat {target}/rows; touch {target}/new; ls /tmp > /dev/null && ls -d /bin; mkdir /x"
    out, err = _run(scheduler, "a", script, [_mount(data, target)], working_dir=target)
    assert out == f"{target}\n1\n2\n/bin\n"
    assert f"{target}/new': Read-only file system" in err
    assert "/x’: Read-only" in err or "'/x': Read-only" in err
    agent.terminate()
    assert _mounted(data.parent) == []
    assert not Path(f"/crater-test-{os.getpid()}").exists()


@as_root
def test_what_is_mounted_inside_the_data_is_as_read_only_as_they_are(start, scheduler: SchedulerStandIn, data: Path):
    subprocess.run(["mount", "-t", "tmpfs", "none", data / "more"], check=True)
    try:
        (data / "more" / "rows").write_text("3\n")
        start(mount_roots=[str(data)])
        out, err = _run(scheduler, "a", "cat /crater-t/more/rows; touch /crater-t/more/new", [_mount(data, "/crater-t")])
        assert (out, "Read-only file system" in err) == ("3\n", True)
    finally:
        subprocess.run(["umount", data / "more"], check=True)


@as_root
def test_what_may_be_written_is_written_on_the_node(start, scheduler: SchedulerStandIn, data: Path, place: Path):
    (place / "there").mkdir()
    (place / "there" / "sibling").write_text("still here\n")
    start(mount_roots=[str(data)])
    script = f"cat {place}/there/sibling; echo 9 > {place}/there/new/out; echo x > {place}/there/other"
    out, err = _run(scheduler, "a", script, [_mount(data, f"{place}/there/new", read_only=False)])
    assert (out, (data / "out").read_text()) == ("still here\n", "9\n")
    # The folder that was made up beside its siblings is not a place to lose files in.
    assert "Read-only file system" in err
    assert os.listdir(place / "there") == ["sibling"]  # noqa: PTH208


@as_root
def test_a_program_that_lies_in_the_data_runs_and_gains_no_privilege(start, scheduler: SchedulerStandIn, data: Path):
    (data / "tool").write_text("#!/bin/sh\ngrep NoNewPrivs /proc/self/status\n")
    (data / "tool").chmod(0o755)
    start(mount_roots=[str(data)])
    scheduler.give("a", ["/crater-t/tool"], mounts=[_mount(data, "/crater-t")])
    assert scheduler.final("a").status == "succeeded"
    assert scheduler.read_log_text("a").split() == ["NoNewPrivs:", "1"]


@as_root
@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("{data}/way-out", "/crater-t", "(it leads to /etc) is outside this node's mount_roots"),
        ("{data}/../secret", "/crater-t", "is outside this node's mount_roots"),
        ("{data}/absent", "/crater-t", "does not exist on this node"),
        ("{data}", "/etc/cron.d", "nothing can be mounted at /etc/cron.d"),
        ("{data}", "/", "nothing can be mounted at /"),
        ("{data}", "{data}/way-out", "which is a link to /etc"),
    ],
)
def test_no_mount_leads_out_of_the_roots_or_over_the_system(start, scheduler, data: Path, source: str, target: str, why: str):
    (data / "way-out").symlink_to("/etc")
    (data.parent / "secret").mkdir()
    start(mount_roots=[str(data)])
    _, said = _run(scheduler, "a", "true", [_mount(Path(source.format(data=data)), target.format(data=data))])
    assert why in said


def test_without_rights_only_a_path_where_it_is_can_be_shown(start, scheduler: SchedulerStandIn, data: Path, place: Path):
    start(mount_roots=[str(data)], **as_ordinary_user(place / "agent-n1"))
    if scheduler.declaration.enforcement == "enforced":
        return
    assert _run(scheduler, "in-place", f"cat {data}/rows", [_mount(data, str(data))]) == ("1\n2\n", "")
    _, why = _run(scheduler, "elsewhere", "true", [_mount(data, "/crater-t")])
    assert why.startswith(f"{data} cannot be shown at /crater-t: this agent may not mount")


@as_root
def test_thirty_rounds_of_start_and_stop_leave_nothing_behind(start, scheduler: SchedulerStandIn, data: Path):
    agent = start(mount_roots=[str(data)])

    def groups() -> list[Path]:
        """One controller's are enough to count."""
        of_memory = [group for group in agent.groups() if group.is_relative_to("/sys/fs/cgroup/memory")]
        return [inner for group in of_memory for inner in agent.groups_in(group)]

    for number in range(0, 30, 5):
        names = [f"t{number + more}" for more in range(5)]
        for name in names:
            # Half of them end by themselves and leave a child, the others are stopped.
            script = "setsid sleep 600 & " + ("true" if number % 2 else "sleep 600")
            extra = {"mounts": [_mount(data, "/crater-t")], "disk_bytes": 10_000_000} if name in names[:2] else {}
            scheduler.give(name, ["sh", "-c", script], grace_ms=100, **extra)
        for name in names:
            if number % 2 == 0:
                scheduler.running(name)
                scheduler.change(name, stop=True)
        for name in names:
            scheduler.final(name, 30)
    folders = [agent.data_dir / name for name in ("allocations", "scratch", "scratch/.images")]
    left = lambda: [path.name for folder in folders for path in folder.iterdir()]  # noqa: E731
    poll_until(lambda: set(left()) <= {".images"}, what="every folder gone")
    poll_until(lambda: len(groups()) <= 2, what="all cgroups gone but those that wait for the next tasks")
    assert _mounted(data.parent) == []
    marker = f"CRATER_SCRATCH_DIR={agent.data_dir}".encode()
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and marker in _environment(pid)]  # noqa: PTH208
    assert agent.terminate() == 0
    poll_until(lambda: not groups(), what="the cgroups that waited gone, too")


def _environment(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
