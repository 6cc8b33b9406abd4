"""A task that names what to import beforehand starts as a fork of a template, and cannot tell the difference otherwise."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from agent_harness import SchedulerStandIn, poll_until

PROBE = """
import json, os, sys, heavy
print(json.dumps({
    "argv": sys.argv, "env": sorted(k for k in os.environ if k.startswith("CRATER_") or k == "OWN"), "cwd": os.getcwd(),
    "loaded_by": heavy.LOADED_BY, "pid": os.getpid(), "sid": os.getsid(0), "draw": heavy.draw(),
    "fds": sorted(os.listdir("/proc/self/fd")), "name": __name__, "version": heavy.VERSION,
    "cgroup": open("/proc/self/cgroup").read(),
}))
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""
HEAVY = "import os, random\nLOADED_BY = os.getpid()\nVERSION = {version}\ndef draw():\n    return random.random()\n"


@pytest.fixture
def code(place: Path) -> Path:
    folder = place / "code"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "heavy.py").write_text(HEAVY.format(version=1))
    return folder


def run(
    scheduler: SchedulerStandIn, code: Path, name: str, *arguments: str, preload: tuple[str, ...] = ("heavy",), **more
) -> dict:
    scheduler.give(
        name, ["python", "-m", "probe", *arguments], warm_preload=list(preload), working_dir=str(code), env={"OWN": "1"}, **more
    )
    scheduler.final(name)
    text = scheduler.read_log_text(name)
    return json.loads(text) if text else {}


def is_warm(told: dict) -> bool:
    """Loaded by another process than the one that ran."""
    return told["loaded_by"] != told["pid"]


def _until_warm(scheduler: SchedulerStandIn, code: Path, prefix: str) -> dict:
    for number in range(100):
        told = run(scheduler, code, f"{prefix}{number}")
        if is_warm(told):
            return told
    raise AssertionError("never warm")


def test_the_first_start_is_cold_and_later_ones_are_forks_that_look_the_same(start, scheduler, code):
    start()
    cold = run(scheduler, code, "cold", "0")
    assert not is_warm(cold)
    _until_warm(scheduler, code, "t")
    warm = run(scheduler, code, "warm", "0")
    assert is_warm(warm)
    assert warm["sid"] == warm["pid"]
    assert warm["draw"] != cold["draw"]
    same = ("env", "cwd", "fds", "name")
    assert {name: warm[name] for name in same} == {name: cold[name] for name in same}
    assert warm["argv"][1:] == cold["argv"][1:] == ["0"]
    # Each in a cgroup of its own, at the same place.
    assert re.sub(r"[0-9a-f]{6}-[0-9]+", "", warm["cgroup"]) == re.sub(r"[0-9a-f]{6}-[0-9]+", "", cold["cgroup"])


def test_exit_codes_and_tracebacks_come_through(start, scheduler, code):
    start()
    _until_warm(scheduler, code, "t")
    run(scheduler, code, "coded", "7")
    ended = scheduler.final("coded")
    assert (ended.status.value, ended.exit_code) == ("failed", 7)
    run(scheduler, code, "raised", "seven")
    assert scheduler.final("raised").exit_code == 1
    assert "ValueError" in scheduler.read_log_text("raised", "stderr")


def test_code_that_changes_is_never_run_from_an_old_template(start, scheduler, code):
    start()
    _until_warm(scheduler, code, "t")
    (code / "heavy.py").write_text(HEAVY.format(version=22))
    assert run(scheduler, code, "changed")["version"] == 22
    assert _until_warm(scheduler, code, "u")["version"] == 22


def test_modules_that_cannot_be_forked_leave_every_start_cold(start, scheduler, code):
    (code / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    start()
    for number in range(8):
        told = run(scheduler, code, f"t{number}", preload=("heavy", "threaded"))
        assert not is_warm(told)


def test_a_fork_that_uses_more_than_its_memory_is_killed_with_numbers(start, scheduler, code):
    agent = start()
    if "enforced" not in scheduler.declaration.enforcement:
        pytest.fail(f"this test needs cgroup rights; the agent says: {agent.log[-500:]}")
    (code / "hog.py").write_text("import heavy\nx = []\nwhile True:\n    x.append(b'x' * 1_000_000)\n")
    _until_warm(scheduler, code, "t")
    scheduler.give(
        "hog", ["python", "-m", "hog"], warm_preload=["heavy"], working_dir=str(code), memory_bytes=64 * 1024**2, env={"OWN": "1"}
    )
    ended = scheduler.final("hog")
    assert (ended.reason.code.value, ended.reason.facts["limit_bytes"]) == ("oom_killed", 64 * 1024**2)


def _templates(code: Path) -> set[int]:
    """Templates, and the spares that they have made."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"crater_agent.template" in line and (entry / "cwd").exists() and str((entry / "cwd").readlink()) == str(code):
                found.add(int(entry.name))
    return found


def _spare(code: Path, template: int) -> int:
    return poll_until(lambda: _templates(code) - {template}, what="a spare waits").pop()


def test_the_next_task_is_the_fork_that_was_made_while_nobody_asked(start, scheduler, code):
    start()
    template = _until_warm(scheduler, code, "t")["loaded_by"]
    for number in range(3):
        spare = _spare(code, template)
        told = run(scheduler, code, f"u{number}")
        assert (told["pid"], told["sid"], told["loaded_by"]) == (spare, spare, template)


def test_tasks_that_start_in_a_row_are_forks_of_their_own(start, scheduler, code):
    start()
    template = _until_warm(scheduler, code, "t")["loaded_by"]
    spare = _spare(code, template)
    names = [f"u{number}" for number in range(4)]
    for name in names:
        scheduler.give(name, ["python", "-m", "probe"], warm_preload=["heavy"], working_dir=str(code), env={"OWN": "1"})
    for name in names:
        scheduler.final(name)
    told = [json.loads(scheduler.read_log_text(name)) for name in names]
    assert {one["loaded_by"] for one in told} == {template}
    assert len({one["pid"] for one in told}) == len({one["draw"] for one in told}) == 4
    assert spare in {one["pid"] for one in told}


def test_a_spare_that_was_killed_is_done_without(start, scheduler, code):
    start()
    template = _until_warm(scheduler, code, "t")["loaded_by"]
    spare = _spare(code, template)
    os.kill(spare, signal.SIGKILL)
    poll_until(lambda: spare not in _templates(code), what="the spare has gone")
    told = run(scheduler, code, "u")
    assert told["loaded_by"] == template
    assert told["pid"] != spare


def test_a_spare_ends_with_its_template(start, scheduler, code):
    start()
    template = _until_warm(scheduler, code, "t")["loaded_by"]
    spare = _spare(code, template)
    os.kill(template, signal.SIGKILL)
    poll_until(lambda: not _templates(code) & {template, spare}, what="both have gone")


def test_templates_end_with_the_agents_last_workload(start, scheduler, code):
    agent = start(arguments=("--stop-workloads-on-exit",))
    template = _until_warm(scheduler, code, "t")["loaded_by"]
    _spare(code, template)
    assert len(_templates(code)) == 2
    agent.terminate()
    poll_until(lambda: not _templates(code), what="no template is left")
