"""A container gets what it was given and no more: programs that try to take more, and what becomes of them."""

from __future__ import annotations

from agent_harness import SchedulerStandIn, poll_until

MIB = 1024**2


def test_memory_over_the_limit_ends_it_with_the_numbers(start, scheduler: SchedulerStandIn, image: str):
    start()
    scheduler.give("a", ["dd", "if=/dev/zero", "of=/dev/null", "bs=200M", "count=1"], image=image, memory_bytes=32 * MIB)
    end = scheduler.final("a")
    assert (end.status.value, end.reason.code.value, end.exit_code) == ("failed", "oom_killed", 137)
    assert end.reason.facts["limit_bytes"] == 32 * MIB
    assert end.use.memory_peak_bytes == end.reason.facts["peak_bytes"] == 32 * MIB


def test_a_kill_from_outside_is_not_called_out_of_memory(start, scheduler: SchedulerStandIn, image: str):
    start()
    scheduler.give("a", ["sh", "-c", "kill -9 $$"], image=image)
    end = scheduler.final("a")
    assert (end.reason.code.value, end.reason.facts["signal"], end.exit_code) == ("signalled", 9, 137)


def test_forks_shared_memory_processors_and_devices_end_where_they_were_given(start, scheduler: SchedulerStandIn, image: str):
    start()
    scheduler.give(
        "forks",
        ["sh", "-c", "while sleep 60 > /dev/null & do :; done"],
        image=image,
        memory_bytes=2048 * MIB,
        cpu_milli=2000,
        time_limit_ms=20_000,
    )
    scheduler.give("shm", ["df", "-m", "/dev/shm"], image=image, shm_bytes=16 * MIB)
    scheduler.give("device", ["sh", "-c", "mknod /tmp/d b 7 0 && head -c1 /tmp/d"], image=image)
    assert scheduler.read_log_text("shm") or scheduler.final("shm").status == "succeeded"
    assert scheduler.read_log_text("shm").splitlines()[1].split()[1] == "16"
    assert scheduler.final("device").status == "failed"
    assert "not permitted" in scheduler.read_log_text("device", "stderr")
    scheduler.final("forks", 40)
    assert scheduler.reports_of("forks")[-1].reason.code == "exit_code"
    assert "can't fork" in scheduler.read_log_text("forks", "stderr")


def test_what_it_uses_is_seen_and_stays_within_its_cores(start, scheduler: SchedulerStandIn, image: str):
    start()
    scheduler.give("a", ["sh", "-c", "yes > /dev/null & yes > /dev/null & sleep 4"], image=image, cpu_milli=250)
    scheduler.running("a")
    uses = [
        beat["uses"]["a"]
        for beat in poll_until(lambda: [b for b in scheduler.heartbeats if b["uses"].get("a", {}).get("cpu_ms", 0) > 300])
    ]
    assert uses[0]["memory_bytes"] > 0
    end = scheduler.final("a")
    assert end.status == "succeeded"
    assert 300 < end.use.cpu_ms < 1_600


def test_disk_over_the_limit_counts_the_containers_own_layer(start, scheduler: SchedulerStandIn, image: str):
    start()
    script = "dd if=/dev/zero of=/tmp/big bs=1M count=40; sleep 60"
    scheduler.give("a", ["sh", "-c", script], image=image, disk_bytes=20 * MIB, grace_ms=100)
    end = scheduler.final("a", 30)
    assert (end.status.value, end.reason.code.value) == ("failed", "disk_exceeded")
    assert end.reason.facts["peak_bytes"] >= 40 * MIB


def test_a_time_limit_asks_first_and_a_grace_that_passes_kills(start, scheduler: SchedulerStandIn, image: str):
    start()
    # Init hands the signal on to a program that waits for it.
    polite = ["sh", "-c", "trap 'echo bye; exit 0' TERM; while true; do sleep 0.1; done"]
    scheduler.give("polite", polite, image=image, time_limit_ms=1_500, grace_ms=20_000)
    scheduler.give("stubborn", ["sh", "-c", "trap '' TERM; echo up; sleep 600"], image=image, grace_ms=500)
    poll_until(lambda: scheduler.running("stubborn") and scheduler.read_log_text("stubborn") == "up\n")
    scheduler.change("stubborn", stop=True)
    stubborn, polite_end = scheduler.final("stubborn"), scheduler.final("polite")
    assert (stubborn.status.value, stubborn.exit_code) == ("cancelled", 137)
    assert (polite_end.reason.code.value, polite_end.reason.facts["limit_ms"]) == ("time_limit", 1_500)
    assert (polite_end.exit_code, scheduler.read_log_text("polite")) == (0, "bye\n")
