"""What goes wrong, and when: one seed turns some of these faults on, and draws the moments of each."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

FAULTS = (
    "scheduler_dies",
    "scheduler_dies_between_steps",
    "scheduler_dies_at_commit",
    "scheduler_pauses",
    "scheduler_is_away_long",
    "scheduler_stops",
    "leader_pauses_until_another_leads",
    "leader_pauses_at_commit",
    "agent_dies",
    "agent_dies_between_steps",
    "agent_dies_at_disk",
    "agent_pauses",
    "spawner_dies",
    "node_dies",
    "node_is_cut_off",
    "node_is_heard_and_hears_nothing",
    "node_hears_and_is_not_heard",
    "messages_are_lost",
    "messages_repeat",
    "messages_are_late",
    "store_is_broken",
    "store_answers_get_lost",
    "store_is_cut_from_a_scheduler",
    "leader_without_store_is_all_a_node_hears",
    "disks_are_slow",
    "clock_of_node_jumps",
    "clock_of_scheduler_jumps",
    "starts_fail",
)


class Chaos:
    """`world` has what can be broken. `heal` takes everything back that is still wrong."""

    def __init__(self, world: Any, rng: Random, faults: tuple[str, ...]) -> None:
        self.world, self.rng, self.faults = world, rng, faults
        self.over = False

    def begin(self, until_s: float) -> None:
        self._constant()
        for fault in self.faults:
            act: Callable[[], None] | None = getattr(self, f"_{fault}", None)
            if act is not None:
                self._again(fault, act, until_s)

    def _again(self, fault: str, act: Callable[[], None], until_s: float) -> None:
        wait_s = self.rng.expovariate(1 / 60)
        if self.world.loop.time() + wait_s < until_s:
            self.world.loop.call_later(wait_s, self._act, fault, act, until_s)

    def _act(self, fault: str, act: Callable[[], None], until_s: float) -> None:
        if not self.over:
            act()
            self._again(fault, act, until_s)

    def _constant(self) -> None:
        world, rng, on = self.world, self.rng, self.faults
        weather = world.network.weather
        weather.lost = rng.choice([5, 50, 200]) if "messages_are_lost" in on else 0
        weather.repeated = rng.choice([20, 200]) if "messages_repeat" in on else 0
        weather.late = rng.choice([10, 100]) if "messages_are_late" in on else 0
        world.store.answers_lost = rng.choice([10, 100]) if "store_answers_get_lost" in on else 0
        slow_s = rng.choice([1.0, 8.0]) if "disks_are_slow" in on else 0.01
        for machine in world.machines:
            machine.slow_s_max = min(slow_s, 2.0)
            machine.start_failures = rng.choice([50, 300]) if "starts_fail" in on else 0
        for host in world.hosts:
            host.slow_s_max = slow_s

    def heal(self) -> None:
        self.over = True
        world = self.world
        self.faults = ()
        self._constant()
        world.network.cut.clear()
        world.store.broken = False
        for host in world.hosts:
            host.cut_from_store = False
            host.process.steps_left = host.process.dies_at_disk = host.process.before_disk = None
            if host.process.paused:
                host.process.resume()
            host.start()
        for machine in world.machines:
            process = machine.agent_process
            process.steps_left = process.dies_at_disk = None
            if process.paused:
                process.resume()
            if not machine.up:
                machine.boot()
            machine.start_agent()

    def _soon(self, wait_s: float, call: Callable[..., Any], *args: Any) -> None:
        """Undone at the latest when all is healed."""
        self.world.loop.call_later(wait_s, lambda: None if self.over else call(*args))

    def _say(self, what: str) -> None:
        self.world.say(f"FAULT {what}")

    # Each of these is drawn about once a minute, in seeds where it is on.

    def _host(self) -> Any:
        return self.rng.choice(self.world.hosts)

    def _machine(self) -> Any:
        return self.rng.choice(self.world.machines)

    def _scheduler_dies(self) -> None:
        host = self._host()
        self._say(f"{host.name} dies")
        host.kill()
        self._soon(self.rng.choice([0.1, 1.0, 5.0]), host.start)

    def _scheduler_dies_between_steps(self) -> None:
        host = self._host()
        host.process.steps_left = self.rng.randrange(1, 200)
        self._soon(10.0, host.start)

    def _scheduler_dies_at_commit(self) -> None:
        host = self._host()
        host.process.dies_at_disk = self.rng.choice(["before", "after"])
        self._soon(10.0, host.start)

    def _scheduler_pauses(self) -> None:
        process, wait_s = self._host().process, self.rng.choice([0.5, 5.0, 35.0, 70.0])
        self._say(f"{process.name} pauses for {wait_s} s")
        process.pause()
        self._soon(wait_s, process.resume)

    def _scheduler_stops(self) -> None:
        host = self._host()
        if host.process.alive and not host.process.paused:
            self._say(f"{host.name} is told to stop")
            host.stop()
            self._soon(self.rng.choice([0.5, 5.0]), host.start)
            self._soon(30.0, host.start)

    def _leader_pauses_until_another_leads(self) -> None:
        for host in self.world.hosts:
            if host.leads and not host.process.paused:
                wait_s = self.rng.choice([9.9, 10.5, 14.0, 25.0, 60.0])
                self._say(f"{host.name} leads, and pauses for {wait_s} s")
                host.process.pause()
                self._soon(wait_s, host.process.resume)
                return

    def _leader_pauses_at_commit(self) -> None:
        """It wakes as soon as another leads, with a write on its way that the other knows nothing of."""
        for host in self.world.hosts:
            if host.leads and not host.process.paused and len(self.world.hosts) > 1:
                host.process.before_disk = (host.engine._writer, lambda host=host: self._pause_until_another_leads(host))
                return

    def _pause_until_another_leads(self, host: Any) -> None:
        process, wait_s = host.process, self.rng.choice([0.0, 0.05, 1.0])
        self._say(f"{host.name} pauses at a commit until another leads, and {wait_s} s longer")
        process.pause()
        at_last_s = self.world.loop.time() + 60.0

        def look() -> None:
            if any(other.leads for other in self.world.hosts if other is not host) or self.world.loop.time() > at_last_s:
                self._soon(wait_s, process.resume)
            else:
                self._soon(0.05, look)

        look()

    def _scheduler_is_away_long(self) -> None:
        host, wait_s = self._host(), self.rng.choice([40.0, 120.0, 600.0])
        self._say(f"{host.name} is away for {wait_s} s")
        host.kill()
        self._soon(wait_s, host.start)

    def _agent_dies(self) -> None:
        machine = self._machine()
        self._say(f"agent of {machine.name} dies")
        machine.stop_agent()
        self._soon(self.rng.choice([0.1, 3.0, 45.0]), machine.start_agent)

    def _agent_dies_between_steps(self) -> None:
        machine = self._machine()
        machine.agent_process.steps_left = self.rng.randrange(1, 100)
        self._soon(5.0, machine.start_agent)

    def _agent_dies_at_disk(self) -> None:
        machine = self._machine()
        machine.agent_process.dies_at_disk = self.rng.choice(["before", "after"])
        self._soon(8.0, machine.start_agent)

    def _agent_pauses(self) -> None:
        process, wait_s = self._machine().agent_process, self.rng.choice([0.5, 10.0, 40.0])
        self._say(f"{process.name} pauses for {wait_s} s")
        process.pause()
        self._soon(wait_s, process.resume)

    def _spawner_dies(self) -> None:
        machine = self._machine()
        # With the agent gone or stopped too, nobody would be left to fence: docs/reliability.md says so.
        if machine.agent_process.alive and not machine.agent_process.paused and machine.up:
            self._say(f"spawner of {machine.name} dies")
            machine.stop_spawner()

    def _node_dies(self) -> None:
        machine = self._machine()
        if machine.up:
            self._say(f"power of {machine.name} is cut")
            machine.crash()
            self._soon(self.rng.choice([5.0, 20.0, 60.0]), lambda: None if machine.up else machine.boot())

    def _cut(self, pairs: list[tuple[str, str]], wait_s: float | None = None) -> None:
        wait_s = wait_s or self.rng.choice([3.0, 20.0, 29.0, 33.0, 90.0, 280.0])
        self._say(f"cut {pairs} for {wait_s} s")
        self.world.network.cut |= set(pairs)
        self._soon(wait_s, self.world.network.cut.difference_update, pairs)

    def _some_hosts(self) -> list[str]:
        """One of the schedulers, or all of them."""
        return [host.name for host in self.rng.choice([[self._host()], self.world.hosts])]

    def _node_is_cut_off(self) -> None:
        machine, hosts = self._machine().name, self._some_hosts()
        self._cut([pair for host in hosts for pair in ((machine, host), (host, machine))])

    def _node_is_heard_and_hears_nothing(self) -> None:
        machine = self._machine().name
        self._cut([(host, machine) for host in self._some_hosts()])

    def _node_hears_and_is_not_heard(self) -> None:
        machine = self._machine().name
        self._cut([(machine, host) for host in self._some_hosts()])

    def _store_is_cut_from_a_scheduler(self) -> None:
        host, wait_s = self._host(), self.rng.choice([2.0, 9.0, 15.0, 60.0])
        self._say(f"{host.name} is cut from the store for {wait_s} s")
        host.cut_from_store = True
        self._soon(wait_s, setattr, host, "cut_from_store", False)

    def _leader_without_store_is_all_a_node_hears(self) -> None:
        """Whoever leads next has to take the node for lost, while the old leader could still tell it to go on."""
        for host in self.world.hosts:
            if host.leads and len(self.world.hosts) > 1:
                machine, wait_s = self._machine().name, self.rng.choice([60.0, 90.0])
                others = [other.name for other in self.world.hosts if other is not host]
                self._say(f"{host.name} leads, and is cut from the store for {wait_s} s")
                host.cut_from_store = True
                self._soon(wait_s, setattr, host, "cut_from_store", False)
                self._cut([pair for other in others for pair in ((machine, other), (other, machine))], wait_s)
                return

    def _store_is_broken(self) -> None:
        wait_s = self.rng.choice([0.5, 10.0, 45.0])
        self._say(f"the store is broken for {wait_s} s")
        self.world.store.broken = True
        self._soon(wait_s, setattr, self.world.store, "broken", False)

    def _clock_of_node_jumps(self) -> None:
        machine, by_ms = self._machine(), self.rng.choice([-86_400_000, -60_000, 60_000, 86_400_000])
        self._say(f"clock of {machine.name} jumps by {by_ms} ms")
        machine.clock.jumped_ms += by_ms

    def _clock_of_scheduler_jumps(self) -> None:
        host, by_ms = self._host(), self.rng.choice([-60_000, -1_000, 1_000, 60_000])
        self._say(f"clock of {host.name} jumps by {by_ms} ms")
        host.clock.jumped_ms += by_ms
