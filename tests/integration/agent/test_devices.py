"""A task opens the device files that it was given and no others: by the devices controller, or by a program in the kernel."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import nvml
import pytest
from agent_harness import SchedulerStandIn, poll_until

from crater_agent import bpf
from crater_agent.cgroup import device_procs_files, read_mounts
from crater_agent.device_files import EVERYBODYS, DeviceFile, of_nvidia, of_path
from crater_agent.device_probe import may_open
from crater_core.wire.resources import GrantView

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="device files are made and held by root alone")
OPENED = "for path in {}; do cat $path > /dev/null 2> said && echo open || sed 's/.*: //' said; done"
NO_DRIVER = "No such device or address"
"""What the kernel answers when it would have opened a card that is not there."""
REFUSED = "Operation not permitted"


@pytest.fixture
def cards(place: Path) -> tuple[Path, Path]:
    paths = place / "nvidia0", place / "nvidia1"
    for minor, path in enumerate(paths):
        os.mknod(path, 0o666 | 0o020000, os.makedev(195, minor))
    return paths


def _opened(scheduler: SchedulerStandIn, allocation: str, paths: tuple[Path, ...], **fields: object) -> list[str]:
    scheduler.give(allocation, ["sh", "-c", OPENED.format(" ".join(map(str, paths)))], **fields)
    assert scheduler.final(allocation).status == "succeeded", scheduler.read_log_text(allocation, "stderr")
    return scheduler.read_log_text(allocation).splitlines()


def test_a_task_opens_the_card_it_was_given_and_no_other(start, scheduler: SchedulerStandIn, cards, place: Path, tmp_path: Path):
    # The second line of the file is the first card by PCI bus: what counts is the driver's own number of a card.
    nvml.write(place / "gpus", [nvml.gpu("GPU-b", bus="00000000:C1:00.0"), nvml.gpu("GPU-a", bus="00000000:01:00.0")])
    start(environ=nvml.environ(nvml.build(tmp_path), place / "gpus"), resource_pools=None)
    assert scheduler.declaration.enforcement == "enforced"
    grant = GrantView(uuid="GPU-a", index=0, compute_milli=1000, memory_mib=81_920, sharing="exclusive", simulated=False)
    assert _opened(scheduler, "with", cards, devices=[grant]) == [REFUSED, NO_DRIVER]
    assert _opened(scheduler, "without", cards) == [REFUSED, REFUSED]


@pytest.mark.parametrize(
    ("cgroups", "form", "visible"), [("auto", "index", "1,0"), ("off", "index", "3,2"), ("off", "uuid", "GPU-3,GPU-2")]
)
def test_by_index_a_task_is_told_what_cuda_counts_for_it(
    start, scheduler: SchedulerStandIn, place: Path, tmp_path: Path, cgroups, form, visible
):
    nvml.write(place / "gpus", [nvml.gpu(f"GPU-{n}", bus=f"00000000:0{n}:00.0") for n in range(4)])
    own = {"CUDA_VISIBLE_DEVICES": "0", "NVIDIA_VISIBLE_DEVICES": "all", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    start(environ={**nvml.environ(nvml.build(tmp_path), place / "gpus"), **own}, resource_pools=None, cgroups=cgroups)
    grants = [GrantView(uuid=f"GPU-{n}", index=n, compute_milli=1000, memory_mib=81_920, sharing="exclusive") for n in (3, 2)]
    script = 'echo "$CUDA_VISIBLE_DEVICES|$CUDA_DEVICE_ORDER|$CRATER_GPU_UUIDS|$CRATER_GPU_MEMORY_MIB|$NVIDIA_VISIBLE_DEVICES"'
    scheduler.give("a", ["sh", "-c", script], devices=grants, gpu_visible_devices=form)
    scheduler.final("a")
    assert scheduler.read_log_text("a") == f"{visible}|PCI_BUS_ID|GPU-3,GPU-2|81920|\n"


def test_any_task_has_what_programs_expect_and_nothing_of_the_machine(start, scheduler: SchedulerStandIn):
    start()
    script = "head -c 1 /dev/zero /dev/urandom /dev/full > /dev/null && python3 -c 'import os; os.openpty()' && cat /dev/kmsg"
    scheduler.give("a", ["sh", "-c", script])
    assert scheduler.final("a").exit_code == 1
    assert scheduler.read_log_text("a", "stderr") == f"cat: /dev/kmsg: {REFUSED}\n"


def test_what_a_task_may_open_is_seen_from_outside_of_it(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", ["sh", "-c", "echo $$; exec sleep 60"])
    pid = int(poll_until(lambda: scheduler.read_log_text("a").strip()))
    inside = device_procs_files(pid)
    before = set(Path(inside[0]).read_text().split())
    assert may_open(inside, Path("/dev/zero")) is True
    assert may_open(inside, Path("/dev/kmsg")) is False
    assert may_open(inside, Path("/dev/not-there")) is None
    assert may_open((f"{inside[0]}.gone",), Path("/dev/zero")) is None
    assert may_open(device_procs_files(os.getpid()), Path("/dev/kmsg")) is True
    assert set(Path(inside[0]).read_text().split()) == before, "nothing is left there"


def test_an_operator_may_give_every_task_a_device_file(start, scheduler: SchedulerStandIn):
    start(device_files=["/dev/kmsg"])
    scheduler.give("a", ["sh", "-c", "exec 3< /dev/kmsg"])
    assert scheduler.final("a").status == "succeeded"


def test_a_wrong_device_file_is_named_at_start(start, place: Path):
    agent = start(device_files=["/etc/passwd"])
    assert agent.process.wait(10) == 2
    assert "device_files[0]" in agent.log
    assert "/etc/passwd is not a device file" in agent.log


def test_version_2_holds_device_files_by_a_program_in_the_kernel(cards: tuple[Path, Path]):
    mount = next(mount for mount in read_mounts(Path("/proc/self/mountinfo").read_text()) if mount.version == 2)
    group = mount.path / f"crater-test-{os.getpid()}"
    group.mkdir()
    try:
        assert bpf.why_not() == ""
        bpf.hold(group, (*EVERYBODYS, of_path(cards[1])))
        script = f"echo 0 > {group}/cgroup.procs; {OPENED.format(f'/dev/zero-not {cards[0]} {cards[1]} /dev/null /dev/kmsg')}"
        said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, cwd=cards[0].parent, timeout=10).stdout
        assert said.splitlines() == ["No such file or directory", REFUSED, NO_DRIVER, "open", REFUSED]
    finally:
        group.rmdir()


def test_the_files_of_a_slice_are_found_where_the_driver_says(tmp_path: Path):
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n195 nvidia\n234 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n  7 loop\n"
    )
    for place, minor in (("gpu0/mig/gi1", 12), ("gpu0/mig/gi1/ci0", 13)):
        directory = tmp_path / "driver/nvidia/capabilities" / place
        directory.mkdir(parents=True)
        (directory / "access").write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")
    files = of_nvidia(0, ("gpu0/mig/gi1", "gpu0/mig/gi1/ci0"), tmp_path)
    assert [file.rule for file in files] == [
        "c 195:0 rwm",
        "c 195:254 rwm",
        "c 195:255 rwm",
        "c 511:* rwm",
        "c 234:12 rwm",
        "c 234:13 rwm",
    ]
    assert DeviceFile("c", 195) in of_nvidia(None, (), tmp_path)
