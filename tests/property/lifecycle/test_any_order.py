"""Whatever happens, in whatever order: the invariants hold, every task ends once, and held time is metered time."""

from __future__ import annotations

from contextlib import suppress
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World, a_node, a_spec

from crater_core.errors import LeaseLost
from crater_core.lifecycle.inputs import NodeCordoned, NodeDrained, NodeRegistered, Planned, ServiceRemoved, ServiceScaled
from crater_core.lifecycle.invariants import violations
from crater_core.model.after import open_dependencies
from crater_core.model.allocation import Allocation, AllocationStatus
from crater_core.model.node import NodeStatus
from crater_core.model.past import decay
from crater_core.model.reason import Reason, ReasonCode
from crater_core.model.snapshot import Settings
from crater_core.model.task import After, Array, RetryPolicy, TaskStatus, When
from crater_core.scheduling import schedule

A = AllocationStatus
NODES = ("n1", "n2", "n3")
HALF_LIFE_MS = 60_000


class Cluster(RuleBasedStateMachine):
    """Three small nodes, tasks and one service, with reports that may be late, repeated or from another lease."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(*(a_node(name, cpu=2, gpus=1) for name in NODES))
        self.world.snapshot.settings = Settings(fair_share_half_life_ms=HALF_LIFE_MS)
        self.submitted: list[str] = []
        self.reported: list[Allocation] = []
        self.arrays = 0
        self.allocation_ids = (f"p{n}" for n in count(1))

    def some_allocation(self, data: st.DataObject) -> Allocation | None:
        live = [self.world.snapshot.allocations[name] for name in sorted(self.world.snapshot.allocations)]
        choices = live + self.reported[-5:]
        return data.draw(st.sampled_from(choices)) if choices else None

    @rule(
        cpu=st.sampled_from([500, 1000, 2000]),
        gpu=st.sampled_from([0, 0, 250, 500, 1000]),
        again=st.booleans(),
        attempts=st.integers(1, 3),
    )
    def submit(self, cpu: int, gpu: int, again: bool, attempts: int) -> None:
        retry = RetryPolicy(attempts, on_node_loss=again, on_failure=attempts > 1)
        self.submitted.append(self.world.submit(a_spec(cpu_milli=cpu, gpu_milli=gpu, retry=retry)))

    @rule(size=st.integers(1, 4), running_max=st.sampled_from([None, 1, 2]), cpu=st.sampled_from([500, 1000]))
    def submit_array(self, size: int, running_max: int | None, cpu: int) -> None:
        self.arrays += 1
        spec = a_spec(cpu_milli=cpu, array=Array(f"y{self.arrays}", size, running_max))
        self.submitted += [self.world.submit(spec) for _ in range(size)]

    @precondition(lambda self: self.submitted)
    @rule(data=st.data(), when=st.sampled_from(When), of_array=st.booleans())
    def submit_after(self, data: st.DataObject, when: When, of_array: bool) -> None:
        """After a task of whatever status, or after all of an array: both may have ended long ago."""
        known = sorted(self.world.snapshot.by_array) if of_array else []
        names = data.draw(st.lists(st.sampled_from(known or self.submitted), min_size=1, max_size=2, unique=True))
        live = [name for name in names if name in self.world.snapshot.tasks or name in self.world.snapshot.by_array]
        self.submitted.append(self.world.submit(a_spec(cpu_milli=500, after=tuple(After(name, when) for name in live))))

    @initialize(
        tasks=st.lists(st.tuples(st.sampled_from([500, 1000]), st.sampled_from([0, 250]), st.booleans()), min_size=3, max_size=8)
    )
    def begin_busy(self, tasks: list[tuple[int, int, bool]]) -> None:
        for cpu, gpu, again in tasks:
            self.submit(cpu, gpu, again, 2)
        self.cycle()
        for allocation in list(self.world.snapshot.allocations.values())[::2]:
            self.world.report(allocation.id, A.RUNNING)

    @rule(ms=st.sampled_from([0, 1, 500, 60_000]))
    def time_passes(self, ms: int) -> None:
        self.world.wait(ms)

    @rule()
    def cycle(self) -> None:
        plan = schedule(self.world.snapshot, self.world.now_ms)
        ids = tuple(next(self.allocation_ids) for _ in plan.placements)
        self.world.do(Planned(plan, ids))
        for task in self.world.snapshot.queued.values():
            assert task.reason is not None, f"{task.id} waits without a reason"

    @rule(data=st.data(), status=st.sampled_from([A.STARTING, A.RUNNING, A.SUCCEEDED, A.FAILED, A.CANCELLED, A.LOST]))
    def report(self, data: st.DataObject, status: AllocationStatus) -> None:
        allocation = self.some_allocation(data)
        if allocation is None:
            return
        self.reported.append(allocation)
        reason = Reason.of(ReasonCode.EXIT_CODE, exit_code=1) if status is A.FAILED else None
        reason = Reason.of(ReasonCode.NODE_LOST, node=allocation.node, silent_ms=0) if status is A.LOST else reason
        self.world.report(allocation.id, status, reason, token=allocation.token)

    @rule(data=st.data())
    def report_of_another_lease(self, data: st.DataObject) -> None:
        allocation = self.some_allocation(data)
        if allocation is None:
            return
        before = dict(self.world.snapshot.allocations)
        with suppress(LeaseLost):
            self.world.report(allocation.id, A.FAILED, token=allocation.token + 1_000_000)
        assert self.world.snapshot.allocations == before

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(self.submitted)))

    @rule(node=st.sampled_from(NODES), forget=st.booleans())
    def node_is_silent(self, node: str, forget: bool) -> None:
        self.world.lose(node, forget=forget)

    @rule(node=st.sampled_from(NODES))
    def node_is_heard(self, node: str) -> None:
        self.world.hear(node)

    @rule(node=st.sampled_from(NODES))
    def node_registers_again(self, node: str) -> None:
        self.world.do(NodeRegistered(a_node(node, cpu=2, gpus=1)))

    @rule(node=st.sampled_from(NODES), cordoned=st.booleans())
    def node_is_cordoned(self, node: str, cordoned: bool) -> None:
        self.world.do(NodeCordoned(node, cordoned, "ann"))

    @rule(node=st.sampled_from(NODES), wait_ms=st.sampled_from([None, 0, 500]))
    def node_is_drained(self, node: str, wait_ms: int | None) -> None:
        self.world.do(NodeDrained(node, None if wait_ms is None else self.world.now_ms + wait_ms, "ann", "new driver"))

    @rule(replicas=st.integers(0, 4), version=st.sampled_from(["v1", "v2"]))
    def deploy(self, replicas: int, version: str) -> None:
        self.world.deploy(replicas=replicas, env={"MODEL": version})

    @precondition(lambda self: "web" in self.world.snapshot.services)
    @rule(replicas=st.integers(0, 4))
    def scale(self, replicas: int) -> None:
        self.world.do(ServiceScaled("web", replicas, "ann"))

    @precondition(lambda self: "web" in self.world.snapshot.services)
    @rule()
    def remove(self) -> None:
        self.world.do(ServiceRemoved("web", "ann"))

    @rule()
    def tick(self) -> None:
        self.world.tick()

    @rule(data=st.data(), ready=st.booleans())
    def replica_probed(self, data: st.DataObject, ready: bool) -> None:
        allocation = self.some_allocation(data)
        if allocation is not None:
            self.world.report(allocation.id, A.RUNNING, ready=ready, token=allocation.token)

    @invariant()
    def all_holds(self) -> None:
        assert violations(self.world.snapshot) == []

    @invariant()
    def arrays_and_order_are_kept(self) -> None:
        """No array holds more places than its limit; nothing that comes after a live task holds anything."""
        snapshot = self.world.snapshot
        placed = [task for task in snapshot.tasks.values() if task.status is not TaskStatus.QUEUED]
        by_array: dict[str, set[str]] = {}
        for task in snapshot.tasks.values():
            if task.spec.array is not None:
                by_array.setdefault(task.spec.array.id, set()).add(task.id)
        assert dict(snapshot.by_array) == by_array
        for array in [task.spec.array for task in placed if task.spec.array is not None]:
            running = {task.id for task in placed if task.spec.array == array}
            assert snapshot.placed_of_array[array.id] == running
            assert array.running_max is None or len(running) <= array.running_max
        for task in placed:
            assert open_dependencies(snapshot, task.spec) == []

    @invariant()
    def the_average_is_what_the_records_say(self) -> None:
        """Every interval weighs what is left of it after so many half-lives."""
        now_ms, snapshot = self.world.now_ms, self.world.snapshot
        spans = [(r.held.cpu_milli, r.from_ms, r.to_ms) for r in self.world.usage]
        spans += [(a.held.cpu_milli, a.assigned_at_ms, now_ms) for a in snapshot.allocations.values()]
        expected = sum(
            held * (decay(now_ms - end_ms, HALF_LIFE_MS) - decay(now_ms - start_ms, HALF_LIFE_MS))
            for held, start_ms, end_ms in spans
        )
        past = snapshot.past.get("default")
        lag = past.lag_at(now_ms, HALF_LIFE_MS)[1] if past else 0.0
        held = sum(a.held.cpu_milli for a in snapshot.allocations.values())
        assert abs(held + lag - expected) < 1e-6 * max(1.0, expected)

    def teardown(self) -> None:
        """Faults stop: every task must end, and every allocation must have closed its record."""
        world = self.world
        for node in NODES:
            world.hear(node)
            world.do(NodeCordoned(node, False, "ann"))
        if "web" in world.snapshot.services:
            world.do(ServiceRemoved("web", "ann"))
        for _ in range(200):
            world.tick()
            self.cycle()
            for allocation in list(world.snapshot.allocations.values()):
                stopping = allocation.status is A.STOPPING
                world.report(allocation.id, A.CANCELLED if stopping else A.SUCCEEDED, exit_code=0)
            world.wait(60_000)
            if not world.snapshot.tasks and not world.snapshot.services:
                break
        assert world.snapshot.tasks == {}, "progress must follow when faults stop"
        assert world.snapshot.services == {}
        assert {world.task(task).status.ended for task in self.submitted} <= {True}
        assert sorted(r.allocation for r in world.usage) == sorted(world.ended_allocations)
        for record in world.usage:
            ended = world.ended_allocations[record.allocation]
            assert record.duration_ms == ended.ended_at_ms - ended.assigned_at_ms
        assert all(node.status is NodeStatus.READY for node in world.snapshot.nodes.values())
        assert TaskStatus.REFUSED not in {task.status for task in world.ended.values()}


Cluster.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAnyOrder = Cluster.TestCase
