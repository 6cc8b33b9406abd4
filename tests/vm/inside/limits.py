"""The limits of cgroup v2 as the kernel keeps them, each against a program that tries to break it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crater_agent.cgroup import Cgroups, Group, Limits, open_cgroups
from crater_agent.cgroup_common import weight
from crater_agent.device_files import EVERYBODYS

MIB = 1024**2
UNIFIED = Path("/sys/fs/cgroup")
JOIN = "import os, sys\nfor file in sys.argv[1].split(','): open(file, 'w').write('0')\n"
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    found, why = open_cgroups("crater-limits")
    assert found is not None, why
    yield found
    for name in found.names():
        end(found.group(name))
    found.close()


@pytest.fixture
def run(cgroups: Cgroups) -> Iterator[Run]:
    started: list[tuple[Group, subprocess.Popen[str]]] = []

    def run(group: Group, program: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", JOIN + program, ",".join(group.procs_files)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        started.append((group, process))
        return process

    yield run
    for group, process in started:
        process.kill()
        # Its children, too, hold the other end of the pipe.
        group.kill()
        process.communicate()


def end(group: Group) -> None:
    while not group.remove():
        group.kill()
        time.sleep(0.01)


def file(name: str, group: str = "a") -> str:
    return (UNIFIED / "crater-limits" / group / name).read_text().strip()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_guest_has_version_2_alone(cgroups: Cgroups):
    assert cgroups.version == 2
    assert (cgroups.no_devices, cgroups.no_cores) == ("", "")
    assert "cgroup2" in Path("/proc/mounts").read_text()
    assert not [mount for mount in Path("/proc/mounts").read_text().splitlines() if mount.split()[2] == "cgroup"]


def test_a_task_gets_its_share_of_a_core_and_no_more(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(cpu_milli=200))
    spinner = run(group, "import time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n")
    assert spinner.wait() == 0
    # 0.2 cores for two seconds and the start before it; without a quota it would be more than 2000.
    assert 200 < group.counters().cpu_ms < 900
    assert int(file("cpu.stat").split("nr_throttled ")[1].split()[0]) > 0


def test_two_tasks_share_one_core_by_weight(cgroups: Cgroups, run: Run):
    spin = "print('up', flush=True)\nsys.stdin.readline()\nwhile True: pass\n"
    groups = {
        name: cgroups.create(name, Limits(cpu_milli=milli, cpu_hard=False, cores=(1,)))
        for name, milli in (("a", 3000), ("b", 500))
    }
    spinners = [run(group, spin) for group in groups.values()]
    for spinner in spinners:
        assert line(spinner) == "up"
    before = {name: group.counters().cpu_ms for name, group in groups.items()}
    for spinner in spinners:
        assert spinner.stdin is not None
        spinner.stdin.write("go\n")
        spinner.stdin.flush()
    while groups["a"].counters().cpu_ms - before["a"] < 1500:
        time.sleep(0.05)
    used = {name: group.counters().cpu_ms - before[name] for name, group in groups.items()}
    assert (int(file("cpu.weight", "a")), int(file("cpu.weight", "b"))) == (weight(3000), weight(500))
    assert used["a"] > 3 * used["b"]


def test_whole_cores_hold_even_one_who_asks_for_others(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(cores=(1,)))
    tries = """
try: os.sched_setaffinity(0, {0})
except OSError: pass
print(sorted(os.sched_getaffinity(0)), flush=True)
sys.stdin.readline()
"""
    process = run(group, tries + "print(sorted(os.sched_getaffinity(0)), flush=True)\n")
    assert line(process) == "[1]"
    group.keep_on((0,))
    assert process.communicate("go\n")[0].strip() == "[0]"
    assert file("cpuset.cpus.effective") == "0"


def test_memory_over_the_limit_is_an_oom_kill_by_the_kernels_own_count(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(memory_bytes=48 * MIB))
    hog = "held = []\nwhile True: held.append(bytearray(4 << 20))\n"
    assert run(group, hog).wait() == -signal.SIGKILL
    counters = group.counters()
    # A process that is killed with its group is counted once more for that.
    assert 1 <= counters.oom_kills <= 2
    assert file("memory.max") == str(48 * MIB)
    assert 40 * MIB < counters.memory_max_bytes <= 48 * MIB


def test_a_kill_by_hand_is_no_oom_kill(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(memory_bytes=48 * MIB))
    process = run(group, "print('up', flush=True)\nsys.stdin.readline()\n")
    assert line(process) == "up"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert group.counters().oom_kills == 0


def test_all_of_a_task_goes_when_one_of_its_processes_is_over(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(memory_bytes=48 * MIB))
    child = """
if os.fork() == 0:
    held = []
    while True: held.append(bytearray(4 << 20))
os.wait()
print("the parent lives on", flush=True)
sys.stdin.readline()
"""
    process = run(group, child)
    assert process.communicate()[0] == ""
    assert process.returncode == -signal.SIGKILL
    assert group.pids() == set()


def test_forks_stop_at_the_limit(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(pids_max=10))
    bomb = """
import time
made = 0
try:
    while os.fork(): made += 1
    time.sleep(60)
except BlockingIOError: print(made, flush=True)
sys.stdin.readline()
"""
    assert line(run(group, bomb)) == "9"
    assert file("pids.current") == "10"
    assert file("pids.events").split()[1] != "0"


def test_the_disk_is_shared_by_weight(cgroups: Cgroups):
    cgroups.create("a", Limits(cpu_milli=2000))
    assert file("io.weight").split() == ["default", str(weight(2000))]


def test_device_files_that_were_not_given_cannot_be_opened(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(devices=EVERYBODYS))
    tries = """
for name in ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/vda", "/dev/mem", "/dev/kmsg", "/tmp/mine"):
    if name == "/tmp/mine":
        try:
            os.mknod(name, 0o60600, os.stat("/dev/vda").st_rdev)
        except OSError as error:
            print(name, "mknod", error.errno); continue
    try:
        os.close(os.open(name, os.O_RDONLY)); print(name, "open")
    except OSError as error:
        print(name, error.errno)
"""
    said = run(group, tries).communicate()[0].splitlines()
    assert said[:6] == ["/dev/null open", "/dev/zero open", "/dev/urandom open", "/dev/vda 1", "/dev/mem 1", "/dev/kmsg 1"]
    # Nor made anew under another name.
    assert said[6] == "/tmp/mine mknod 1"


def test_a_device_that_was_given_is_let_in_and_nothing_beside_it(cgroups: Cgroups, run: Run):
    from crater_agent.device_files import of_path

    group = cgroups.create("a", Limits(devices=(*EVERYBODYS, of_path(Path("/dev/vdb")))))
    tries = """
for name in ("/dev/vdb", "/dev/vda"):
    try: os.close(os.open(name, os.O_RDONLY)); print(name, "open")
    except OSError as error: print(name, error.errno)
"""
    assert run(group, tries).communicate()[0].splitlines() == ["/dev/vdb open", "/dev/vda 1"]


def test_the_whole_group_dies_even_who_left_the_session_or_forks_on(cgroups: Cgroups, run: Run):
    group = cgroups.create("a", Limits(pids_max=200))
    escapes = """
import signal, time
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            os.mkdir(f"/sys/fs/cgroup/crater-limits/a/{os.getpid()}")
            open(f"/sys/fs/cgroup/crater-limits/a/{os.getpid()}/cgroup.procs", "w").write("0")
            print("up", flush=True)
            while True: time.sleep(60)
        os._exit(0)
sys.stdin.readline()
"""
    process = run(group, escapes)
    assert [line(process) for _ in range(5)] == ["up"] * 5
    pids = group.pids()
    assert len(pids) >= 6
    group.kill()
    assert process.wait() == -signal.SIGKILL
    while group.pids():
        time.sleep(0.01)
    end(group)
    assert cgroups.names() == []
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _processes() -> int:
    return len([path for path in Path("/proc").iterdir() if path.name.isdigit()])


def test_fifty_rounds_leave_no_group_and_no_process(cgroups: Cgroups):
    before = _processes()
    for number in range(50):
        group = cgroups.create(f"round-{number}", Limits(cpu_milli=500, memory_bytes=64 * MIB, devices=EVERYBODYS))
        pid = os.fork()
        if pid == 0:
            try:
                Path(group.procs_files[0]).write_text("0")
                signal.pause()
            finally:
                os._exit(0)
        while pid not in group.pids():
            time.sleep(0.002)
        group.kill()
        os.waitpid(pid, 0)
        end(group)
    assert cgroups.names() == []
    assert _processes() <= before + 2
