"""The one owner of the cluster's state: it decides, commits once for all that came together, and wakes those who wait."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from crater_core.clock import Clock, SystemClock
from crater_core.errors import CraterError, NotLeader, StaleRevision, StaleTerm, StoreUnavailable
from crater_core.lifecycle.apply import apply
from crater_core.lifecycle.inputs import Input, Planned, Report, ReservationMoved, TaskSubmitted, Tick
from crater_core.model.node import Node, NodeStatus
from crater_core.model.prices import PriceTable
from crater_core.model.reservation import Reservation
from crater_core.model.runtimes import RunTimes
from crater_core.model.service import Service
from crater_core.model.snapshot import Settings, Snapshot, copy_of
from crater_core.model.task import Task, TaskSpec, TaskStatus
from crater_core.scheduling import explain, moved_reservations, schedule
from crater_core.service.batch import Batch
from crater_core.service.bell import Bell
from crater_core.service.demand import Demand
from crater_core.service.dependencies import finder, outside
from crater_core.service.heard import Heard
from crater_core.service.ids import Ids
from crater_core.service.shown import Shown
from crater_core.service.submits import KeyLookup, Recalled, Submission, Submitted, prepare_submits, recalled
from crater_core.store.protocol import Commit, Committed, Loaded, Store, SubmitKey, TaskFilter

T = TypeVar("T")
log = logging.getLogger("crater.engine")
BATCH_MAX = 500
"""How many callers one turn serves; the next turn takes the rest."""
DECISIONS_LOGGED_MAX = 50
HISTORY_READ_MAX = 2_000
"""How many ended tasks are looked at when a scheduler starts, to foretell run times."""


class Observer(Protocol):
    """Measures how long things take (see metrics)."""

    def cycle(self) -> AbstractContextManager[object]: ...

    def commit(self) -> AbstractContextManager[object]: ...


class Unobserved:
    """Implements `Observer`."""

    def cycle(self) -> AbstractContextManager[object]:
        return nullcontext()

    def commit(self) -> AbstractContextManager[object]:
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Prepared:
    inputs: Sequence[Input]
    keys: Sequence[SubmitKey] = ()
    value: Any = None


@dataclass(slots=True)
class Work:
    """What one caller wants done: `prepare` sees the newest state and gives inputs, or raises to refuse it all."""

    prepare: Callable[[Batch], Prepared]
    done: asyncio.Future[Any]
    value: Any = None
    refusals: list[CraterError | None] = field(default_factory=lambda: [])
    error: BaseException | None = None


class Engine:
    """Lives in one event loop. Readers look at `shown`, which never runs ahead of the store."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        clock: Clock | None = None,
        observer: Observer | None = None,
        *,
        standby: bool = False,
    ) -> None:
        """Takes the store over at once, or stands by until `lead` is called."""
        self.clock = clock or SystemClock()
        self.store = store
        self.settings = settings
        self.observer = observer or Unobserved()
        self.bell = Bell()
        self.ids = Ids(self.clock)
        self.heard = Heard(self.clock)
        self.leading = not standby
        self.leads_until_ms: int | None = None
        """By the monotonic clock; None: for as long as the store does not say otherwise."""
        self.own_url = ""
        """Where others find this one."""
        self.leader_url = ""
        """Of the scheduler that leads while this one stands by; "" when nobody does."""
        self.term = 0 if standby else store.begin_term()
        self._run_times = run_times_of(store)
        self._prices: PriceTable | None = None
        self._take_over(store.load())
        self.demand = Demand(task.spec for task in self.shown.snapshot.tasks.values())
        self._queue: asyncio.Queue[Work] = asyncio.Queue()
        self._turning = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._reader = ThreadPoolExecutor(2, thread_name_prefix="store-read")
        self._loop_task: asyncio.Task[None] | None = None
        self._cycle_wanted = self._services_wanted = True
        self._reload_wanted = False
        self.trouble: str | None = None
        """Why nothing can be written now; None when all is well."""
        self.stale = asyncio.Event()
        """Set when another scheduler has taken over the store."""

    def _take_over(self, loaded: Loaded) -> None:
        self.term = self.term if self.leading else loaded.term
        self.shown = Shown(loaded, self.settings)
        self.shown.snapshot.run_times = self._run_times.copy()
        self.shown.snapshot.term = self.term
        self.shown.snapshot.prices = self._prices
        self._working = copy_of(self.shown.snapshot)

    # Leading and standing by, for stores that several schedulers share.

    async def lead(self, term: int, until_ms: int) -> None:
        """Begin to decide, from what the store holds now, in a term that the store has given."""
        async with self._turning:
            self.term, self.leading, self.leads_until_ms = term, True, until_ms
            try:
                self._run_times = await self.read(run_times_of, self.store)
                self._take_over(await self.read(self.store.load))
                self.demand = Demand(task.spec for task in self.shown.snapshot.tasks.values())
            except BaseException:
                self.leading = False
                raise
            self.stale.clear()
            # Nobody is declared lost before a whole time-out under this leader, and every agent registers with it.
            self.heard = Heard(self.clock)
            self.trouble = None
            self._cycle_wanted = self._services_wanted = True
            self.bell.ring_all()
        self._come_back()

    async def step_down(self) -> None:
        """Decide nothing more. Who waits is sent to the new leader."""
        async with self._turning:
            self.leading, self.leader_url = False, ""
            while not self._queue.empty():
                _fail(self._queue.get_nowait(), self._not_leader())
            self._working = copy_of(self.shown.snapshot)
            self.bell.ring_all()

    def follow(self, commits: Sequence[Commit]) -> None:
        """Take in what the leader has committed, in order."""
        for commit in commits:
            assert not self.leading, "a leader follows nobody"
            assert commit.revision == self.shown.revision + 1, "no commit is left out"
            self.bell.ring(self.shown.advance(commit.changes, commit.revision, commit.sequence))

    def follow_anew(self, loaded: Loaded) -> None:
        """Take in everything: too much has happened to take it in step by step."""
        self._take_over(loaded)
        self.bell.ring_all()

    def must_lead(self) -> None:
        """Raises NotLeader for a standby. A leader that is not sure any more to be one says StoreUnavailable."""
        if not self.leading:
            raise self._not_leader()
        if self._lead_is_over():
            why = self.why_not_writable()
            raise StoreUnavailable(f"this scheduler does not know whether it still leads: {why}", reason=why)

    def _lead_is_over(self) -> bool:
        return self.leading and self.leads_until_ms is not None and self.clock.monotonic_ms() > self.leads_until_ms

    def why_not_writable(self) -> str | None:
        """None when all is well. A store that has not answered yet may cost the lead before it is known to be in trouble."""
        return self.trouble or ("it could not renew its lead in time" if self._lead_is_over() else None)

    def _not_leader(self) -> NotLeader:
        where = f"the leader is at {self.leader_url}" if self.leader_url else "nobody leads now"
        return NotLeader(f"this scheduler stands by; {where}", leader=self.leader_url)

    def start(self) -> None:
        self._loop_task = asyncio.create_task(self._run(), name="engine")
        if self.leading:
            self._come_back()

    def _come_back(self) -> None:
        """To what waits for a moment, known from before this scheduler led."""
        now_ms = self.clock.now_ms()
        for not_before_ms in {task.not_before_ms for task in self.shown.snapshot.queued.values()}:
            if not_before_ms > now_ms:
                self._later(not_before_ms - now_ms, self.want_cycle)
        for node in self.shown.snapshot.nodes.values():
            self._remember_drain(node, now_ms)
        for reservation in self.shown.snapshot.reservations.values():
            self._remember_reservation(reservation, now_ms)
        self.want_services()

    async def stop(self) -> None:
        """Finish the turn in progress; later callers are refused."""
        self.bell.close()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        while not self._queue.empty():
            _fail(self._queue.get_nowait(), StoreUnavailable("the scheduler is stopping"))
        self._writer.shutdown(wait=True)
        self._reader.shutdown(wait=True)

    # What callers use.

    async def do(self, prepare: Callable[[Batch], Prepared]) -> Work:
        """Run `prepare` on the newest state, apply its inputs, and come back when all of it is durable."""
        if self.bell.closed:
            raise StoreUnavailable("the scheduler is stopping")
        self.must_lead()
        work = Work(prepare, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(work)
        await work.done
        return work

    async def happen(self, *inputs: Input, check: Callable[[Snapshot], None] | None = None) -> list[CraterError | None]:
        """Apply inputs; says for each why it was refused, if it was. `check` may raise to refuse all."""

        def prepare(batch: Batch) -> Prepared:
            if check is not None:
                check(batch.snapshot)
            return Prepared(inputs)

        return (await self.do(prepare)).refusals

    async def submit(self, submissions: Sequence[Submission]) -> list[Submitted]:
        """All or none; comes back when they are durable, placed already where they could be."""

        self.must_lead()
        keys = [(one.spec.user, one.key) for one in submissions if one.key is not None]
        earlier = await self.recall(keys, [one.spec for one in submissions])

        def prepare(batch: Batch) -> Prepared:
            lookup = self.key_lookup(batch, earlier)
            find = finder(batch, self.shown, earlier.names)
            return Prepared(*prepare_submits(submissions, batch.snapshot, lookup, find))

        return (await self.do(prepare)).value

    async def recall(self, keys: Sequence[tuple[str, str]], specs: Sequence[TaskSpec]) -> Recalled:
        """What the store knows of a submit, asked before the turn: no turn waits for a network. What is written in between
        is known to the turn itself; another scheduler's key makes the commit fail, and the caller asks again.
        """
        names = outside(specs, self.shown)
        if not names and (not keys or self.store.quick_reads):
            return Recalled({}, {})
        try:
            return await self.read(recalled, self.store, () if self.store.quick_reads else keys, names)
        except StoreUnavailable as error:
            self.trouble = error.message
            raise

    def key_lookup(self, batch: Batch, earlier: Recalled) -> KeyLookup:
        def known(user: str, key: str) -> SubmitKey | None:
            found = batch.keys.get((user, key)) or earlier.keys.get((user, key))
            return self.store.find_key(user, key) if found is None and self.store.quick_reads else found

        return known

    def counts_as_lost(self, node: str) -> bool:
        """Also when it was decided a moment ago, and is still on its way to the disk."""
        known = (self.shown.snapshot.nodes.get(node), self._working.nodes.get(node))
        return any(one is not None and one.status is NodeStatus.LOST for one in known)

    async def read(self, call: Callable[..., Any], *args: Any) -> Any:
        """A read of the store, off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *args)

    async def look(self, call: Callable[..., T], *args: Any) -> T:
        """A quick, pure look at the newest state between two turns, with all that decisions remember of it."""
        async with self._turning:
            return call(self._working if self.leading else self.shown.snapshot, *args)

    async def write(self, call: Callable[..., Any], *args: Any) -> Any:
        """House-keeping of the store, in turn with the commits."""
        async with self._writing:
            return await self._in_writer(call, *args)

    async def _in_writer(self, call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._writer, call, *args)

    def use_prices(self, prices: PriceTable | None) -> None:
        """From the next decision on. Prices make no room: no cycle is wanted for them."""
        self._prices = self._working.prices = self.shown.snapshot.prices = prices

    def want_cycle(self) -> None:
        """Look at the queue again, although nothing has happened but time."""
        self._cycle_wanted = True
        self._nudge()

    def want_services(self) -> None:
        self._services_wanted = True
        self._nudge()

    def _nudge(self) -> None:
        if self._queue.empty() and not self.bell.closed and self.leading:
            self._queue.put_nowait(Work(lambda _: Prepared(()), asyncio.get_running_loop().create_future()))

    # The loop.

    async def _run(self) -> None:
        while True:
            works = [await self._queue.get()]
            while len(works) < BATCH_MAX and not self._queue.empty():
                works.append(self._queue.get_nowait())
            turn = asyncio.ensure_future(self._turn(works))
            try:
                await asyncio.shield(turn)
            except asyncio.CancelledError:
                await asyncio.gather(turn, return_exceptions=True)
                raise

    async def _turn(self, works: list[Work]) -> None:
        async with self._turning:
            if self.leading:
                await self._turn_as_leader(works)
            else:
                for work in works:
                    _fail(work, self._not_leader())

    async def _turn_as_leader(self, works: list[Work]) -> None:
        try:
            if self._reload_wanted:
                self._run_times = await self.read(run_times_of, self.store)
                self._take_over(await self.read(self.store.load))
                self._reload_wanted = False
                self.bell.ring_all()
            decided_ms = self.clock.now_ms()
            batch = self._decide(works, decided_ms)
            changes = batch.changes
            if changes or self.trouble is not None:  # Trouble is over when a write, even of nothing, succeeds.
                keys = list(batch.keys.values())
                async with self._writing:
                    with self.observer.commit():
                        finish = self.store.stage(changes, self._working.revision, self.term, keys)
                        committed: Committed = await self._in_writer(finish)
                if self.trouble is not None:
                    log.info("the store can be written again")
                self.trouble = None
                self._remember_times(batch, decided_ms)
                self._working.revision = committed.revision
                self.bell.ring(self.shown.advance(changes, committed.revision, committed.sequence))
        except StaleTerm as error:
            log.error("this scheduler leads no more: %s", error.message)
            self.leads_until_ms = 0
            self.stale.set()
            self._undo(works, StoreUnavailable(error.message))
        except StaleRevision as error:
            self._reload_wanted = True
            self._undo(works, StoreUnavailable(f"the store has moved on: {error.message}"))
        except CraterError as error:
            if self.trouble is None:
                log.error("nothing can be written now: %s", error.message)
            self.trouble = error.message
            self._undo(works, error)
            await asyncio.sleep(0.05)  # Trouble outside: let more callers gather before the next try.
        except Exception as error:
            log.exception("a turn failed")
            self._undo(works, error)
        else:
            for work in works:
                _settle(work)

    def _undo(self, works: list[Work], error: Exception) -> None:
        """Nothing was written: forget what this turn decided."""
        self._working = copy_of(self.shown.snapshot)
        self._cycle_wanted = self._services_wanted = True
        for work in works:
            _fail(work, error)

    def _decide(self, works: list[Work], now_ms: int) -> Batch:
        batch = Batch(self._working)
        for work in works:
            try:
                prepared = work.prepare(batch)
                batch.keys.update({(key.user, key.key): key for key in prepared.keys})
                work.value = prepared.value
                work.refusals = [self._apply(batch, happened, now_ms) for happened in prepared.inputs]
            except StoreUnavailable:
                raise
            except CraterError as error:
                work.error = error
            except Exception as error:  # A bug, and this caller's only: the others are served.
                log.exception("an input failed")
                work.error = error
        if batch.touches_services or self._services_wanted:
            self._reconcile_services(batch, now_ms)
        if batch.makes_room or self._cycle_wanted:
            self._cycle(batch, now_ms)
        return batch

    def _apply(self, batch: Batch, happened: Input, now_ms: int) -> CraterError | None:
        if isinstance(happened, Report) and happened.use is None:
            # The last measurement is better than none: it closes the usage record.
            happened = replace(happened, use=self.heard.use_of(happened.node, happened.allocation))
        try:
            batch.take(apply(batch.snapshot, happened, now_ms))
        except CraterError as refusal:
            return refusal
        if isinstance(happened, TaskSubmitted):
            self.demand.count(happened.spec)
        return None

    def _reconcile_services(self, batch: Batch, now_ms: int) -> None:
        self._services_wanted = False
        wanted = sum(service.replicas + 1 for service in batch.snapshot.services.values())
        try:
            changes = apply(batch.snapshot, Tick(self.ids.many("t", wanted)), now_ms)
        except Exception:  # As in a cycle: a fault here is no reason to refuse agents and callers.
            log.exception("services could not be brought to their number")
            return
        batch.take(changes)
        for moved in moved_reservations(batch.snapshot, now_ms):
            batch.take(apply(batch.snapshot, ReservationMoved(moved), now_ms))

    def _cycle(self, batch: Batch, now_ms: int) -> None:
        self._cycle_wanted = False
        if not batch.snapshot.queued:
            self.shown.reasons = {}
            return
        try:
            with self.observer.cycle():
                plan = schedule(batch.snapshot, now_ms)
            if log.isEnabledFor(logging.DEBUG):
                for placement in plan.placements[:DECISIONS_LOGGED_MAX]:
                    _log_decision(batch.snapshot, placement.task, placement.node, now_ms)
            changes = apply(batch.snapshot, Planned(plan, self.ids.many("a", len(plan.placements))), now_ms)
        except Exception:
            # A fault here must not keep agents from reporting and callers from cancelling.
            log.exception("a cycle failed; the queue stays as it is")
            batch.snapshot.scratch = None
            return
        batch.take(changes)
        self.shown.reasons = plan.waiting
        if plan.placements and len(batch.snapshot.queued) > self.settings.cycle_tasks_max:
            self._later(0, self.want_cycle)  # One cycle looks at so many; the next one at those behind them.

    def _remember_times(self, batch: Batch, decided_ms: int) -> None:
        """Come back to what waits for a moment after the decision: a task's backoff, a service's next replica. The moment
        may have passed while the disk was waited for."""
        now_ms = self.clock.now_ms()
        for entity in batch.puts.values():
            if isinstance(entity, Task) and entity.status is TaskStatus.QUEUED and entity.not_before_ms > decided_ms:
                self._later(entity.not_before_ms - now_ms, self.want_cycle)
            elif isinstance(entity, Service) and entity.retry_at_ms > decided_ms:
                self._later(entity.retry_at_ms - now_ms, self.want_services)
            elif isinstance(entity, Node):
                self._remember_drain(entity, now_ms)
            elif isinstance(entity, Reservation):
                self._remember_reservation(entity, now_ms)

    def _remember_reservation(self, reservation: Reservation, now_ms: int) -> None:
        self._later(reservation.from_ms - now_ms, self.want_cycle)
        self._later(reservation.to_ms - now_ms, self.want_services)

    def _remember_drain(self, node: Node, now_ms: int) -> None:
        if node.drain is not None and node.drain.deadline_ms is not None:
            self._later(node.drain.deadline_ms - now_ms, self.want_services)

    def _later(self, wait_ms: int, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(max(0, wait_ms) / 1000 + 0.001, call)


def _log_decision(snapshot: Snapshot, task_id: str, node: str, now_ms: int) -> None:
    explanation = explain(snapshot, task_id, now_ms)
    candidates = [
        f"{c.node}={c.score:.4f}" if c.score is not None else f"{c.node}:{c.rejection.code.value if c.rejection else '?'}"
        for c in explanation.candidates[:DECISIONS_LOGGED_MAX]
    ]
    log.debug("task %s placed on %s by %s; candidates: %s", task_id, node, explanation.strategy, " ".join(candidates))


def run_times_of(store: Store) -> RunTimes:
    """What the newest tasks that succeeded tell of those to come."""
    run_times = RunTimes()
    for stored in reversed(store.tasks(TaskFilter((TaskStatus.SUCCEEDED.value,)), HISTORY_READ_MAX)):
        run_times.learn(stored.task)
    return run_times


def _settle(work: Work) -> None:
    if work.done.done():
        return
    if work.error is not None:
        work.done.set_exception(work.error)
    else:
        work.done.set_result(None)


def _fail(work: Work, error: Exception) -> None:
    if not work.done.done():
        work.done.set_exception(error)
        work.done.exception()  # Looked at here: a caller that has gone does not make it "never retrieved".
