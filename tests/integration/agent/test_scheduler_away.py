"""A scheduler that is down, silent, moved, or new: what an agent keeps, what it stops, and when."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent_harness import SchedulerStandIn, poll_until, stand_in, start_agent


@contextmanager
def silence(port: int) -> Iterator[None]:
    """Takes connections at a port and never answers, as a network that swallows packets."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(64)
    held: list[socket.socket] = []

    def take() -> None:
        while True:
            try:
                held.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in held:
            connection.close()
        thread.join(5)


def _pid(scheduler: SchedulerStandIn, allocation: str) -> int:
    return int(poll_until(lambda: scheduler.running(allocation) and scheduler.read_log_text(allocation)))


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


SLEEPER = ["sh", "-c", "echo $$; exec sleep 600"]


def test_a_scheduler_that_is_down_costs_no_task_however_long(start, scheduler: SchedulerStandIn):
    scheduler.timeout_ms = 2_000
    start()
    scheduler.give("a", SLEEPER)
    scheduler.give("ends", ["sleep", "3"])
    pid = _pid(scheduler, "a")
    scheduler.running("ends")
    scheduler.stop()
    time.sleep(5)  # More than twice the time-out: this is the claim, so it has to pass.
    assert _runs(pid)
    scheduler.start()
    assert scheduler.final("ends").status == "succeeded"
    assert _runs(pid)


def test_silence_fences_what_may_be_started_elsewhere_in_time_and_keeps_the_rest(start, scheduler: SchedulerStandIn):
    scheduler.timeout_ms = 3_000
    start()
    scheduler.give("moves", SLEEPER)
    scheduler.give("stays", SLEEPER, restartable=False)
    moves, stays = _pid(scheduler, "moves"), _pid(scheduler, "stays")
    port = scheduler.port
    scheduler.stop()
    began = time.monotonic()
    with silence(port):
        poll_until(lambda: not _runs(moves), 10, "the fence")
        assert time.monotonic() - began < 3.0
        assert _runs(stays)
    scheduler.start()
    end = scheduler.final("moves")
    assert (end.status.value, end.reason.code.value) == ("lost", "node_lost")
    assert _runs(stays)


def test_a_standby_without_a_leader_costs_no_task(start, scheduler: SchedulerStandIn):
    scheduler.timeout_ms = 2_000
    start()
    scheduler.give("a", SLEEPER)
    pid = _pid(scheduler, "a")
    scheduler.leader = ""
    time.sleep(4)  # Twice the time-out: this is the claim, so it has to pass.
    assert _runs(pid)


def test_the_spawner_fences_when_no_agent_is_left_to_do_it(start, scheduler: SchedulerStandIn):
    scheduler.timeout_ms = 3_000
    agent = start()
    scheduler.give("moves", ["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done"])
    scheduler.give("stays", SLEEPER, restartable=False)
    moves, stays = _pid(scheduler, "moves"), _pid(scheduler, "stays")
    agent.kill()
    began = time.monotonic()
    poll_until(lambda: not _runs(moves), 10, "the fence")
    assert time.monotonic() - began < 3.2
    assert _runs(stays)
    agent.restart()
    end = scheduler.final("moves")
    assert (end.status.value, end.reason.code.value) == ("lost", "node_lost")


def test_a_paused_agent_does_not_let_two_copies_run(start, scheduler: SchedulerStandIn):
    scheduler.timeout_ms = 3_000
    agent = start()
    scheduler.give("moves", SLEEPER)
    pid = _pid(scheduler, "moves")
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        poll_until(lambda: not _runs(pid), 6, "the fence")
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    assert scheduler.final("moves").status == "lost"


def test_a_scheduler_that_forgot_its_agents_is_registered_with_again(start, scheduler: SchedulerStandIn):
    start()
    scheduler.give("a", SLEEPER)
    pid = _pid(scheduler, "a")
    scheduler.forget()
    poll_until(lambda: len(scheduler.declarations) == 2, what="a second registration")
    assert _runs(pid)
    scheduler.give("b", ["true"])
    assert scheduler.final("b").status == "succeeded"


def test_an_order_of_an_older_leader_is_refused(start, scheduler: SchedulerStandIn):
    scheduler.term = 5
    agent = start()
    scheduler.give("a", SLEEPER)
    pid = _pid(scheduler, "a")
    scheduler.term = 4
    scheduler.take("a")
    poll_until(lambda: "an order of term 4 is refused" in agent.log, what="the refusal")
    assert _runs(pid)
    scheduler.term = 6
    scheduler._revision += 1
    assert scheduler.final("a").status == "cancelled"


def test_a_standby_sends_the_agent_to_the_leader(place: Path):
    with stand_in() as leader, stand_in(leader=leader.url) as standby:
        agent = start_agent(place, standby.url)
        try:
            leader.give("a", ["true"])
            assert leader.final("a").status == "succeeded"
            assert standby.declarations == []
        finally:
            agent.stop()


def test_the_next_endpoint_is_tried_when_one_is_down(place: Path):
    with stand_in() as gone:
        dead = gone.url
    with stand_in() as alive:
        agent = start_agent(place, alive.url, scheduler_endpoint=[dead, alive.url])
        try:
            alive.give("a", ["true"])
            assert alive.final("a").status == "succeeded"
        finally:
            agent.stop()


def test_a_wrong_token_is_said_and_tried_again(place: Path):
    with stand_in(token="right") as scheduler:
        agent = start_agent(place, scheduler.url, environ={"CRATER_TOKEN": "wrong"})
        try:
            poll_until(lambda: "registering failed, trying again: no such token" in agent.log, what="the complaint")
            scheduler.token = "wrong"
            scheduler.give("a", ["sh", "-c", "env"])
            assert scheduler.final("a").status == "succeeded"
            assert "CRATER_TOKEN" not in scheduler.read_log_text("a")
            assert "wrong" not in agent.log
        finally:
            agent.stop()
