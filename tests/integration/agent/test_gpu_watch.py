"""Tasks on real GPUs are watched, and GPUs that are unwell or not free are not given out: a real agent on the NVML stand-in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import nvml
import pytest
from agent_harness import AgentProcess, SchedulerStandIn, poll_until, start_agent
from harness import start_scheduler
from playwright.sync_api import sync_playwright

from crater_core.wire.agents import DeviceDeclaration
from crater_core.wire.resources import GrantView

SLEEP = ["sh", "-c", "echo $$; exec sleep 60"]
StartAgent = Callable[..., AgentProcess]


class Cards:
    """The machine's GPUs, as the driver tells of them. Two are free and well at first."""

    def __init__(self, file: Path, library: Path) -> None:
        self.environ = nvml.environ(library, file)
        self._file = file
        self._cards = {
            "GPU-a": {"bus": "00000000:01:00.0", "use": 0},
            "GPU-b": {"bus": "00000000:02:00.0", "use": 0},
        }
        self._more: list[str] = []
        self._xids = 0
        self._write()

    def change(self, uuid: str, **fields: Any) -> None:
        self._cards[uuid] |= fields
        self._write()

    def lose(self, uuid: str) -> dict[str, Any]:
        card = self._cards.pop(uuid)
        self._write()
        return card

    def find_again(self, uuid: str, card: dict[str, Any]) -> None:
        self._cards[uuid] = card
        self._write()

    def put(self, *lines: str) -> None:
        """In place of what stood there beside the cards."""
        self._more = list(lines)
        self._write()

    def xid(self, uuid: str, number: int) -> None:
        self._xids += 1
        self._more.append(nvml.xid(uuid, number, self._xids))
        self._write()

    def _write(self) -> None:
        nvml.write(self._file, [*(nvml.gpu(uuid, **card) for uuid, card in self._cards.items()), *self._more])


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def cards(place: Path, library: Path) -> Cards:
    return Cards(place / "gpus", library)


@pytest.fixture
def begin(start: StartAgent, cards: Cards) -> Callable[..., AgentProcess]:
    """An agent that looks as often as it may, and gives a device out again as soon as it is well."""

    def start_one(**overrides: Any) -> AgentProcess:
        health = {"recheck": "1s", "well_for": "0s", **overrides.pop("gpu_health", {})}
        settings = {"sample_interval": "5s", "resource_pools": None, "gpu_health": health}
        return start(environ=cards.environ, **{**settings, **overrides})

    return start_one


def _share(uuid: str, memory_mib: int, compute_milli: int = 250) -> GrantView:
    index = 0 if uuid == "GPU-a" else 1
    return GrantView(uuid=uuid, index=index, compute_milli=compute_milli, memory_mib=memory_mib, sharing="time_slice")


def _whole(uuid: str) -> GrantView:
    index = 0 if uuid == "GPU-a" else 1
    return GrantView(uuid=uuid, index=index, compute_milli=1000, memory_mib=81_920, sharing="exclusive")


def _pid(scheduler: SchedulerStandIn, allocation: str) -> int:
    return int(poll_until(lambda: scheduler.read_log_text(allocation).strip(), what=f"the pid of {allocation}"))


def _device(scheduler: SchedulerStandIn, uuid: str) -> DeviceDeclaration:
    return next(device for device in scheduler.declaration.devices if device.uuid == uuid)


def _until(check: Callable[[], Any], what: str) -> Any:
    return poll_until(check, 25, what)


def _warned(scheduler: SchedulerStandIn, allocation: str, code: str) -> Any:
    def seen() -> Any:
        return [r.reason for r in scheduler.reports_of(allocation) if r.reason is not None and r.reason.code == code]

    return _until(seen, f"{allocation} warned: {code}")[0]


def _metrics(scheduler: SchedulerStandIn) -> str:
    with httpx.Client(trust_env=False) as client:
        return client.get(f"{scheduler.declaration.agent_url}/metrics").text


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that Crater has not started."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


# ---- memory


def test_the_memory_of_all_processes_of_a_task_counts_together(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True})
    scheduler.give("a", ["sh", "-c", "sleep 60 & echo $!; wait"], devices=[_share("GPU-a", 10_000)], grace_ms=500)
    child = _pid(scheduler, "a")
    main = int(Path(f"/proc/{child}/stat").read_text().split()[3])
    cards.put(nvml.process("GPU-a", main, 6_000), nvml.process("GPU-a", child, 5_000))
    warning = _warned(scheduler, "a", "over_gpu_memory")
    assert warning.facts == {"device": "0", "limit_mib": 10_000, "peak_mib": 11_000}
    end = scheduler.final("a", 25)
    assert (end.status.value, end.reason.code.value) == ("failed", "gpu_memory_exceeded")
    assert end.reason.facts == {"limit_mib": 10_000, "peak_mib": 11_000}
    assert end.use.gpu_memory_peak_mib == 11_000


def test_a_task_that_keeps_to_its_share_goes_on_beside_one_that_does_not(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True})
    for name in ("good", "greedy"):
        scheduler.give(name, SLEEP, devices=[_share("GPU-a", 10_000)], grace_ms=500)
    good, greedy = _pid(scheduler, "good"), _pid(scheduler, "greedy")
    cards.put(nvml.process("GPU-a", good, 9_000), nvml.process("GPU-a", greedy, 60_000))
    assert scheduler.final("greedy", 25).reason.code.value == "gpu_memory_exceeded"
    cards.put(nvml.process("GPU-a", good, 9_000))
    used = _until(
        lambda: [beat for beat in scheduler.heartbeats if beat["uses"].get("good", {}).get("gpu_memory_mib")], "its use"
    )
    assert used[-1]["uses"]["good"]["gpu_memory_mib"] == 9_000
    assert not [report for report in scheduler.reports_of("good") if report.reason is not None]


def test_a_task_that_gives_memory_back_is_no_longer_warned(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True})
    scheduler.give("a", SLEEP, devices=[_share("GPU-a", 10_000)])
    pid = _pid(scheduler, "a")
    cards.put(nvml.process("GPU-a", pid, 10_500))
    _warned(scheduler, "a", "over_gpu_memory")
    cards.put(nvml.process("GPU-a", pid, 9_500))
    _until(lambda: scheduler.reports_of("a")[-1].reason is None, "the warning taken back")
    assert scheduler.reports_of("a")[-1].status.value == "running"


# ---- use


def test_shares_of_use_never_add_up_to_more_than_the_device(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_sharing={"enabled": True})
    for name in ("a", "b"):
        scheduler.give(name, SLEEP, devices=[_share("GPU-a", 10_000)])
    a, b = _pid(scheduler, "a"), _pid(scheduler, "b")
    cards.change("GPU-a", use=80)
    cards.put(nvml.process("GPU-a", a, 1_000, 75), nvml.process("GPU-a", b, 2_000, 25))

    def seen() -> Any:
        uses = scheduler.heartbeats[-1]["uses"] if scheduler.heartbeats else {}
        return uses if uses.get("a", {}).get("gpu_percent_milli") and uses.get("b", {}).get("gpu_percent_milli") else None

    uses = _until(seen, "the use of both")
    assert (uses["a"]["gpu_percent_milli"], uses["b"]["gpu_percent_milli"]) == (600, 200)
    assert (uses["a"]["gpu_memory_mib"], uses["b"]["gpu_memory_mib"]) == (1_000, 2_000)
    assert 0 < uses["b"]["gpu_busy_ms"] < uses["a"]["gpu_busy_ms"]
    text = _metrics(scheduler)
    assert 'crater_task_gpu_use_percent{allocation="a",index="0",name="name-a",node="n1",task="task-a",uuid="GPU-a"} 60.0' in text
    assert 'crater_gpu_use_percent{gpu_type="nvidia-a100",index="0",node="n1",simulated="false",uuid="GPU-a"} 80.0' in text


def test_each_device_is_measured_for_prometheus(cards: Cards, begin, scheduler: SchedulerStandIn):
    cards.put(*nvml.values("GPU-b", nvlink_tx=5, nvlink_rx=6, throttle=0x44, ecc_corrected=9))
    begin()
    labels = 'gpu_type="nvidia-a100",index="1",node="n1",simulated="false",uuid="GPU-b"'
    text = _until(lambda: text if f"crater_gpu_sm_clock_mhz{{{labels}}}" in (text := _metrics(scheduler)) else "", "a reading")
    cause = 'cause="hardware_thermal",' + labels
    for line in (
        f"crater_gpu_temperature_celsius{{{labels}}} 40.0",
        f"crater_gpu_power_milliwatt{{{labels}}} 60000.0",
        f"crater_gpu_pcie_received_kib_per_s{{{labels}}} 200.0",
        f"crater_gpu_nvlink_sent_kib_total{{{labels}}} 5.0",
        f"crater_gpu_ecc_corrected{{{labels}}} 9.0",
        f"crater_gpu_throttled{{{cause}}} 1.0",
        f"crater_gpu_healthy{{{labels}}} 1.0",
    ):
        assert line in text


def test_a_device_that_does_not_answer_stops_no_other(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_health={"answer_within": "1s"})
    assert _device(scheduler, "GPU-a").healthy
    cards.put(*nvml.values("GPU-a", sleep_ms=4_000))
    _until(lambda: "has not answered" in _device(scheduler, "GPU-a").unwell, "the slow one set aside")
    cards.change("GPU-b", use=64)
    line = 'crater_gpu_use_percent{gpu_type="nvidia-a100",index="1",node="n1",simulated="false",uuid="GPU-b"} 64.0'
    _until(lambda: line in _metrics(scheduler), "the other one read")
    assert _device(scheduler, "GPU-b").healthy
    cards.put()
    _until(lambda: _device(scheduler, "GPU-a").healthy, "the slow one given out again")


def test_what_a_task_used_is_still_known_after_a_restart_of_the_agent(cards: Cards, begin, scheduler: SchedulerStandIn):
    agent = begin()
    scheduler.give("a", ["sh", "-c", "trap 'exit 0' TERM; echo $$; while :; do sleep 0.05; done"], devices=[_whole("GPU-a")])
    pid = _pid(scheduler, "a")
    cards.change("GPU-a", use=100)
    cards.put(nvml.process("GPU-a", pid, 9_000, 100))
    _until(lambda: scheduler.heartbeats[-1]["uses"].get("a", {}).get("gpu_busy_ms"), "its use")
    before = scheduler.heartbeats[-1]["uses"]["a"]
    agent.kill()
    cards.put(nvml.process("GPU-a", pid, 1_000, 100))
    agent.restart()
    _until(lambda: scheduler.heartbeats[-1]["uses"]["a"]["gpu_memory_mib"] == 1_000, "its use again")
    os.kill(pid, 15)
    use = scheduler.final("a").use
    assert (use.gpu_memory_peak_mib, use.gpu_busy_ms >= before["gpu_busy_ms"]) == (9_000, True)


# ---- health


def test_the_fault_of_a_card_takes_it_out_and_ends_its_task_as_lost(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_health={"well_for": "1s"})
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")], grace_ms=500)
    scheduler.give("b", SLEEP, devices=[_whole("GPU-b")])
    _pid(scheduler, "b")
    scheduler.running("a")
    cards.xid("GPU-a", 48)
    end = scheduler.final("a", 25)
    assert (end.status.value, end.reason.code.value) == ("lost", "gpu_fault")
    assert end.reason.facts == {"device": "0", "node": "n1", "why": "the driver reported Xid 48 (double-bit ECC error)"}
    told = _until(lambda: [d for n in scheduler.declarations for d in n.devices if not d.healthy], "the quarantine")
    assert {(device.uuid, device.unwell) for device in told} == {("GPU-a", "the driver reported Xid 48 (double-bit ECC error)")}
    _until(lambda: _device(scheduler, "GPU-a").healthy, "its release, without a restart")
    assert not [report for report in scheduler.reports_of("b") if report.status.ended]


def test_a_card_whose_fault_no_reading_shows_stays_out_over_a_restart(cards: Cards, begin, scheduler: SchedulerStandIn):
    agent = begin(gpu_health={"well_for": "1h"})
    assert _device(scheduler, "GPU-a").healthy
    cards.xid("GPU-a", 79)
    why = _until(lambda: _device(scheduler, "GPU-a").unwell, "the quarantine")
    assert why == "the driver reported Xid 79 (GPU has fallen off the bus)"
    agent.kill()
    cards.put()
    told = len(scheduler.declarations)
    agent.restart()
    _until(lambda: len(scheduler.declarations) > told and not _device(scheduler, "GPU-a").healthy, "the quarantine again")
    assert _device(scheduler, "GPU-a").unwell == why
    assert _device(scheduler, "GPU-b").healthy
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")])
    assert why in str(scheduler.final("a").reason.facts["why"])


def test_the_fault_of_a_program_is_told_and_costs_no_card(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", ["sh", "-c", "trap 'exit 7' TERM; echo $$; while :; do sleep 0.05; done"], devices=[_whole("GPU-a")])
    pid = _pid(scheduler, "a")
    cards.xid("GPU-a", 31)
    assert _warned(scheduler, "a", "gpu_xid").facts == {"device": "0", "what": "Xid 31 (GPU memory page fault)"}
    os.kill(pid, 15)
    end = scheduler.final("a")
    assert (end.reason.code.value, end.exit_code) == ("exit_code", 7)
    assert all(device.healthy for declaration in scheduler.declarations for device in declaration.devices)


def test_running_work_may_be_kept_and_is_not_blamed_when_it_then_fails(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_health={"running_work": "keep", "well_for": "1h"})
    scheduler.give("a", ["sh", "-c", "trap 'exit 7' TERM; echo $$; while :; do sleep 0.05; done"], devices=[_whole("GPU-a")])
    pid = _pid(scheduler, "a")
    cards.xid("GPU-a", 95)
    _until(lambda: not _device(scheduler, "GPU-a").healthy, "the quarantine")
    assert not [report for report in scheduler.reports_of("a") if report.status.ended]
    os.kill(pid, 15)
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value, end.exit_code) == ("lost", "gpu_fault", 7)


def test_a_card_that_falls_off_the_bus_comes_back_without_a_restart(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")], grace_ms=500)
    scheduler.running("a")
    card = cards.lose("GPU-a")
    assert scheduler.final("a", 25).reason.facts["why"] == "NVML cannot read it: GPU is lost"
    assert _device(scheduler, "GPU-b").healthy
    _until(lambda: "GPU is lost" in _device(scheduler, "GPU-a").unwell, "the quarantine")
    cards.find_again("GPU-a", card)
    _until(lambda: _device(scheduler, "GPU-a").healthy, "its return")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"ecc_uncorrected": 3}, "3 uncorrectable ECC error(s) since its last reset"),
        ({"remap_pending": 1}, "rows of its memory wait to be remapped"),
        ({"remap_failed": 1}, "could not be remapped: it has to be replaced"),
        ({"retired_pending": 1}, "pages of its memory wait to be retired"),
        ({"recovery": 1}, "the driver asks for a reset"),
    ],
)
def test_a_card_that_wants_attention_takes_nothing_new(values, why, cards: Cards, begin, scheduler: SchedulerStandIn):
    cards.put(*nvml.values("GPU-a", **values))
    begin()
    _until(lambda: why in _device(scheduler, "GPU-a").unwell, "the quarantine")
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")])
    end = scheduler.final("a")
    assert (end.reason.code.value, end.reason.facts["retryable"], why in str(end.reason.facts["why"])) == (
        "start_failed",
        1,
        True,
    )
    cards.put()
    _until(lambda: _device(scheduler, "GPU-a").healthy, "its release")


def test_a_device_used_from_outside_is_not_given_out_and_the_reason_says_by_whom(
    cards: Cards, begin, scheduler: SchedulerStandIn, stranger: subprocess.Popen[bytes]
):
    cards.put(nvml.process("GPU-a", stranger.pid, 3_000), nvml.process("GPU-b", stranger.pid, 300, kind="graphics"))
    begin()
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    _until(lambda: not _device(scheduler, "GPU-a").healthy, "the quarantine")
    assert _device(scheduler, "GPU-a").unwell == f"in use from outside Crater by pid {stranger.pid} of {user} (sleep)"
    assert _device(scheduler, "GPU-b").healthy
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")])
    assert f"pid {stranger.pid}" in str(scheduler.final("a").reason.facts["why"])
    told = len(scheduler.declarations)
    scheduler.give("again", SLEEP, devices=[_whole("GPU-a")])
    assert scheduler.final("again").reason.code.value == "start_failed"
    beats = len(scheduler.heartbeats)
    _until(lambda: len(scheduler.heartbeats) >= beats + 8, "some seconds")
    assert len(scheduler.declarations) == told, "a start that was refused changes nothing"
    stranger.kill()
    stranger.wait()
    cards.put()
    _until(lambda: _device(scheduler, "GPU-a").healthy, "its release")


def test_a_device_that_still_holds_memory_after_a_release_is_not_given_out(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")])
    pid = _pid(scheduler, "a")
    cards.change("GPU-a", used_mib=30_000)
    cards.put(nvml.process("GPU-a", pid, 29_900))
    _until(lambda: scheduler.heartbeats[-1]["uses"].get("a", {}).get("gpu_memory_mib"), "its use")
    os.kill(pid, 9)
    scheduler.final("a")
    cards.put()
    scheduler.give("next", SLEEP, devices=[_whole("GPU-a")])
    end = scheduler.final("next", 25)
    assert (end.reason.code.value, end.reason.facts["retryable"]) == ("start_failed", 1)
    _until(lambda: "30000 MiB of its memory are held" in _device(scheduler, "GPU-a").unwell, "the quarantine")
    cards.change("GPU-a", used_mib=100)
    _until(lambda: _device(scheduler, "GPU-a").healthy, "its release")
    scheduler.give("last", SLEEP, devices=[_whole("GPU-a")])
    scheduler.running("last")


def test_what_the_driver_gives_back_in_time_costs_no_start(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")])
    pid = _pid(scheduler, "a")
    cards.change("GPU-a", used_mib=30_000)
    os.kill(pid, 9)
    scheduler.final("a")
    scheduler.give("next", SLEEP, devices=[_whole("GPU-a")])
    cards.change("GPU-a", used_mib=100)
    scheduler.running("next")
    assert all(device.healthy for declaration in scheduler.declarations for device in declaration.devices)


# ---- idleness


def test_a_task_that_leaves_its_gpu_unused_is_warned_then_stopped(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin()
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")], gpu_idle_stop_ms=10_000, grace_ms=500)
    scheduler.give("b", SLEEP, devices=[_whole("GPU-b")])
    a, b = _pid(scheduler, "a"), _pid(scheduler, "b")
    cards.put(nvml.process("GPU-a", a, 1_000), nvml.process("GPU-b", b, 1_000))
    warning = _warned(scheduler, "a", "gpu_idle")
    assert warning.facts["what_follows"] == "; it is stopped at 10 s of that"
    end = scheduler.final("a", 25)
    assert (end.status.value, end.reason.code.value, end.reason.facts["limit_ms"]) == ("failed", "gpu_idle_stopped", 10_000)
    assert not [report for report in scheduler.reports_of("b") if report.reason is not None or report.status.ended]


def test_any_use_begins_the_window_anew(cards: Cards, begin, scheduler: SchedulerStandIn):
    begin(gpu_idle_warning="5s")
    scheduler.give("a", SLEEP, devices=[_whole("GPU-a")])
    pid = _pid(scheduler, "a")
    cards.put(nvml.process("GPU-a", pid, 1_000))
    _warned(scheduler, "a", "gpu_idle")
    cards.change("GPU-a", use=3)
    _until(lambda: scheduler.reports_of("a")[-1].reason is None, "the warning taken back")


# ---- with a real scheduler


def _console(url: str, part: str) -> str:
    """What the console shows in a browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#content", state="visible")
        return page.inner_text(part)


def test_a_scheduler_places_nothing_on_a_device_in_quarantine_and_says_why(place: Path, cards: Cards):
    """On the device that is left over, first; then the task waits until the other comes back."""
    scheduler = start_scheduler(place, heartbeat_interval="1s", heartbeat_timeout="10s")
    health = {"recheck": "1s", "well_for": "0s"}
    keys = {"sample_interval": "5s", "resource_pools": None, "gpu_health": health}
    agent = start_agent(place, scheduler.url, environ=cards.environ, **keys)
    client = httpx.Client(base_url=scheduler.url, trust_env=False, timeout=30)

    def submit() -> str:
        body = {"name": "t", "command": ["sleep", "60"], "resources": {"gpu": 1, "cpu": 0.1, "memory": "64MiB"}}
        return client.post("/v1/tasks", json=body).json()["id"]

    def status(task: str) -> str:
        return client.get(f"/v1/tasks/{task}").json()["status"]

    def devices() -> dict[str, Any]:
        nodes = client.get("/v1/nodes").json()["nodes"]
        return {device["uuid"]: device for node in nodes for device in node["devices"]}

    try:
        poll_until(lambda: len(devices()) == 2, what="the node")
        cards.put(*nvml.values("GPU-a", remap_pending=1))
        _until(lambda: not devices()["GPU-a"]["healthy"], "the quarantine")
        assert devices()["GPU-a"]["unwell"].startswith("rows of its memory wait to be remapped")
        assert "in quarantine: rows of its memory wait to be remapped" in _console(scheduler.url, "#nodes")
        first, second = submit(), submit()
        poll_until(lambda: status(first) == "running", what="the first task")
        assert client.get(f"/v1/tasks/{first}").json()["devices"][0]["uuid"] == "GPU-b"
        assert status(second) == "queued"
        cards.put()
        _until(lambda: status(second) == "running", "the second task")
        assert client.get(f"/v1/tasks/{second}").json()["devices"][0]["uuid"] == "GPU-a"
    finally:
        client.close()
        agent.stop()
        scheduler.kill()
