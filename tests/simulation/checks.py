"""What must hold, checked at every commit against all that was ever written, and at every start against what truly runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from crater_core.lifecycle.changes import Changes
from crater_core.lifecycle.invariants import violations
from crater_core.model.allocation import Allocation
from crater_core.model.resources import NOTHING, Amounts
from crater_core.model.snapshot import Settings, Snapshot
from crater_core.model.task import Task
from crater_core.model.units import MILLI
from crater_core.model.usage import UsageRecord
from crater_core.scheduling import quota_use


class Broken(AssertionError):
    """A promise does not hold."""


def must(holds: bool, promise: str) -> None:
    if not holds:
        raise Broken(promise)


class Ledger:
    """Every commit, in order. A failed check is kept too: the code under test may swallow the exception."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.snapshot = Snapshot(settings=settings)
        self.say = say
        self.failure: Broken | None = None
        self.revision = self.term = 0
        self.commits = 0
        self.tasks: dict[str, Task] = {}
        self.allocations: dict[str, Allocation] = {}
        self.usage: dict[str, UsageRecord] = {}
        self.acknowledged: set[str] = set()

    def fail(self, error: Broken) -> None:
        self.failure = self.failure or error
        self.say(f"BROKEN: {error}")

    def new_term(self, term: int) -> None:
        self.say(f"term {term}")
        self._check(lambda: must(term > self.term, f"terms only grow: {term} after {self.term}"))
        self.term = term

    def committed(self, changes: Changes, revision: int, term: int) -> None:
        self.commits += 1
        self._check(lambda: self._take(changes, revision, term))

    def _check(self, check: Callable[[], None]) -> None:
        try:
            check()
        except Broken as error:
            self.fail(error)

    def _take(self, changes: Changes, revision: int, term: int) -> None:
        must(revision == self.revision + 1, f"revisions grow by one: {revision} after {self.revision}")
        must(term == self.term, f"a write of term {term} in term {self.term}")
        self.revision = revision
        usage = {record.allocation: record for record in changes.usage}
        must(len(usage) == len(changes.usage), "an allocation is metered once")
        for entity in changes.puts:
            if isinstance(entity, Task):
                self._take_task(entity)
            elif isinstance(entity, Allocation):
                self._take_allocation(entity, usage)
        must(set(usage) <= {e.id for e in changes.puts if isinstance(e, Allocation) and e.status.ended}, "metered as it ends")
        self.snapshot.advance(changes.puts, changes.removed)
        self.snapshot.revision = revision
        found = [*violations(self.snapshot), *self._quotas(), *self._gangs()]
        must(not found, "; ".join(found))

    def _take_task(self, task: Task) -> None:
        known = self.tasks.get(task.id)
        must(known is None or not known.status.ended, f"{task.id} ends once: {known and known.status} and {task.status}")
        must(known is None or task.attempt >= known.attempt, f"{task.id}: attempts only grow")
        must(known is None or known.spec == task.spec, f"{task.id}: a spec is never edited")
        if known is None or known.status is not task.status:
            self.say(f"{task.id} {task.status.value} attempt {task.attempt} {task.reason.code.value if task.reason else ''}")
        self.tasks[task.id] = task

    def _take_allocation(self, allocation: Allocation, usage: dict[str, UsageRecord]) -> None:
        name, known = allocation.id, self.allocations.get(allocation.id)
        must(known is None or not known.status.ended, f"{name} ends once")
        must(known is None or (known.token, known.node) == (allocation.token, allocation.node), f"{name}: one lease, one token")
        if known is None or known.status is not allocation.status:
            self.say(f"{name} of {allocation.task} on {allocation.node} {allocation.status.value}")
        self.allocations[name] = allocation
        if allocation.status.ended:
            record = usage.get(name)
            must(record is not None and name not in self.usage, f"{name} is metered as it ends, and once")
            assert record is not None
            assert allocation.ended_at_ms is not None
            held_ms = max(0, allocation.ended_at_ms - allocation.assigned_at_ms)
            must(record.duration_ms == held_ms, f"{name}: metered {record.duration_ms} ms, held {held_ms} ms")
            must(record.held == allocation.held, f"{name}: metered what it held")
            self.usage[name] = record

    def _quotas(self) -> list[str]:
        found: list[str] = []
        for name, use in quota_use(self.snapshot).items():
            limits = self.snapshot.policies[name].limits
            for kind in ("gpu_milli", "cpu_milli", "memory_bytes", "disk_bytes"):
                limit = getattr(limits, kind)
                if limit is not None and getattr(use.used, kind) > limit:
                    found.append(f"policy {name}: {kind} {getattr(use.used, kind)} used, {limit} allowed")
        return found

    def _gangs(self) -> list[str]:
        found: list[str] = []
        for task in self.snapshot.tasks.values():
            live = self.snapshot.by_task.get(task.id, {})
            members = {a.member for a in live.values()}
            if len(members) < len(live):
                found.append(f"a member of {task.id} is placed twice")
            if live and task.spec.members > len(live):
                # Only because the others have ended already, or because the gang is elastic.
                mine = [a for a in self.allocations.values() if a.task == task.id and a.attempt == task.attempt]
                if not task.spec.members_fewest <= len(mine) <= task.spec.members:
                    found.append(f"gang {task.id} is placed in part: {len(mine)} of {task.spec.members}")
        return found

    def all_is_over(self) -> None:
        live = sorted(f"{t.id} {t.status.value} {t.reason}" for t in self.tasks.values() if not t.status.ended)
        must(not live, f"when faults stop every task must end; still there: {live}")
        must(self.acknowledged <= set(self.tasks), f"acknowledged and lost: {self.acknowledged - set(self.tasks)}")
        ended = {name for name, allocation in self.allocations.items() if allocation.status.ended}
        must(ended == set(self.allocations) == set(self.usage), "every allocation has ended and is metered")


class Truth:
    """What runs on the machines, whatever anybody believes."""

    def __init__(self, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.ledger, self.say = ledger, say
        self.running: dict[str, dict[int, Any]] = defaultdict(dict)
        """Programs by task."""
        self.started_in: dict[str, str] = {}
        self.fences = 0
        self.starts = 0
        self._pids = 1000

    def new_pid(self) -> int:
        self._pids += 1
        return self._pids

    def started(self, program: Any) -> None:
        self.starts += 1
        self.say(f"{program.lease.allocation} STARTS on {program.machine.name} as {program.pid}")
        try:
            self._check_start(program)
        except Broken as error:
            self.ledger.fail(error)
        self.running[program.lease.task][program.pid] = program

    def _check_start(self, program: Any) -> None:
        lease, machine = program.lease, program.machine
        for other in self.running[lease.task].values():
            where = f"{lease.allocation} starts on {machine.name} while {other.lease.allocation} runs on {other.machine.name}"
            must(other.lease.attempt == lease.attempt, f"two copies of {lease.task} run at once: {where}")
            must(other.lease.member != lease.member, f"two copies of a member of {lease.task} run at once: {where}")
        known = self.ledger.allocations[lease.allocation]
        must(not known.status.ended, f"{lease.allocation} starts after its end ({known.status.value})")
        before = self.started_in.get(lease.allocation)
        must(before != machine.boot_id, f"{lease.allocation} is started twice")
        must(before is None or known.started_at_ms is None, f"{lease.allocation} is started again, and had been reported running")
        self.started_in[lease.allocation] = machine.boot_id
        mates = [p for p in machine.programs.values() if p.lives]
        for device in machine.node.devices:
            held = sum(grant.compute_milli for p in mates for grant in p.lease.devices if grant.uuid == device.uuid)
            must(held <= MILLI, f"{held} thousandths of {device.uuid} are in use: {[p.lease.allocation for p in mates]}")
        used: Amounts = sum((Amounts(p.lease.cpu_milli, p.lease.memory_bytes) for p in mates if not p.lease.control), NOTHING)
        room = machine.node.allocatable
        must(used.cpu_milli <= room.cpu_milli, f"{used.cpu_milli} thousandths of a core in use on {machine.name}")
        must(used.memory_bytes <= room.memory_bytes, f"{used.memory_bytes} bytes in use on {machine.name}")

    def ended(self, program: Any) -> None:
        self.running[program.lease.task].pop(program.pid, None)
        self.say(f"{program.lease.allocation} OVER on {program.machine.name}")

    def fenced(self, program: Any) -> None:
        self.fences += 1
        self.say(f"{program.lease.allocation} FENCED on {program.machine.name}")

    def asked_to_end(self, program: Any, workload: Any) -> None:
        if workload.stop is not None and workload.stop[1].code.value == "node_lost":
            self.fenced(program)

    def all_is_over(self) -> None:
        left = sorted(p.lease.allocation for programs in self.running.values() for p in programs.values())
        must(not left, f"nothing may run on when all has ended: {left}")
